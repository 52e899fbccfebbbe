"""The adapters of a model in memory: read, put into slots, forgotten; and which tokens of a step use which slot."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from bough.core.control import AdapterCommand, CommandResult, PlaceAdapter, ReadAdapter
from bough.core.errors import BoughError, ModelError, ResourceError
from bough.core.settings import LoraSettings
from bough.distributed.topology import ONE_RANK
from bough.executor.layout import LongArray
from bough.executor.load_model import LoadedWeights
from bough.executor.staging import Staging
from bough.kernels.lora.reference import AdapterRows, group_rows
from bough.layers.adapters import Adapter, AdapterSlots
from bough.loader.adapters import read_adapter
from bough.models.base import CausalLM
from bough.models.registry import build_model

NO_ROWS: LongArray = np.zeros(0, dtype=np.int64)
READERS = 4  # adapters that are read at the same time


class AdapterStore:
    """Adapters by name in the host's memory, in the type of the weights."""

    def __init__(self, loaded: LoadedWeights, slots: AdapterSlots, settings: LoraSettings) -> None:
        self._loaded, self._slots, self._settings = loaded, slots, settings
        self._shapes = slots.shapes() if loaded.topology.ranks == 1 else whole_shapes(loaded)
        self._adapters: dict[str, Adapter] = {}
        self._reading: dict[str, Future[tuple[Adapter, str]]] = {}  # that have begun, by name
        self._readers = ThreadPoolExecutor(READERS, "adapters")

    def obey(self, command: AdapterCommand, drop: Callable[[], None]) -> CommandResult:
        """Does the command. `drop` is called before the slots get other memory."""
        if isinstance(command, ReadAdapter):
            self._reading[command.name] = self._readers.submit(self._read, command.path)
            return CommandResult(done=self._reading[command.name].done)
        if isinstance(command, PlaceAdapter):
            self._slots.place(command.slot, self._adapters[command.name])
            return CommandResult()
        if command.path is None:
            del self._adapters[command.name]
            return CommandResult()
        begun = self._reading.pop(command.name, None) or self._readers.submit(self._read, command.path)
        found, hashed = self._on_all_ranks(begun)
        if self._slots.lacks(found):
            rank = max(down.shape[-2] for down, _ in found.values())
            drop()
            try:
                self._slots.reserve(rank, found)
            except torch.OutOfMemoryError as error:
                instead = f"start with --max-lora-rank {rank}, which keeps it free, or lower --max-loras-per-batch."
                raise ResourceError(f"There is no memory left for slots of rank {rank}; {instead}") from error
        self._adapters[command.name] = found
        return CommandResult(content=hashed)

    def _on_all_ranks(self, reading: Future[tuple[Adapter, str]]) -> tuple[Adapter, str]:
        """What was read. Where one rank could not read it, it is an error on all: files may change meanwhile."""
        error = reading.exception()
        if self._loaded.group.all_say(error is None):
            return reading.result()
        raise error or ModelError("Another rank could not read the adapter.")

    def _read(self, path: str) -> tuple[Adapter, str]:
        """The adapter, and what its files hash to. What a file may hold is no reason to end the engine."""
        try:
            found, hashed = read_adapter(path, self._loaded.config, self._shapes, self._settings)
        except BoughError:
            raise
        except Exception as error:
            raise ModelError(f"{path} cannot be read as an adapter ({type(error).__name__}: {error}).") from error
        share = self._slots.share(found)
        return {name: (self._kept(down), self._kept(up)) for name, (down, up) in share.items()}, hashed

    def _kept(self, matrix: torch.Tensor) -> torch.Tensor:
        """Pinned where it is copied to a device, so that nobody waits for the copy."""
        kept = self._slots.form(matrix.to(self._loaded.dtype))
        if self._loaded.device.type == "cpu":
            return kept
        with torch.cuda.device(self._loaded.device):  # whose context pins memory; a new thread has the first device
            return kept.pin_memory()


def whole_shapes(loaded: LoadedWeights) -> dict[str, tuple[int, ...]]:
    """Outputs and inputs of the matrices that ranks share, as one rank would have them."""
    whole = AdapterSlots(1, experts=loaded.topology.ep_size == 1)
    list(build_model(loaded.config, ONE_RANK, loaded.dtype, torch.device("meta"), adapters=whole).slots())
    return whole.shapes()


class AdapterInputs:
    """Owns the persistent buffer through which a GPU learns which rows have which adapter: a captured step reads it."""

    def __init__(self, tokens: int, slots: int, device: torch.device, staging: Staging) -> None:
        self._slots, self._staging = slots, staging
        self._buffer = torch.zeros(2 * tokens, dtype=torch.int32, device=device)  # slots of tokens, then of ends

    def send(self, slots: LongArray, ends: LongArray = NO_ROWS, size: int = 0, ends_size: int = 0) -> AdapterRows:
        """Copies a step: the slots of its tokens, and the places among them whose hidden states are asked for. They are
        padded to the sizes of a graph."""
        sizes = (size or len(slots), ends_size or len(ends))
        packed = np.zeros(sum(sizes), dtype=np.int32)
        packed[: len(slots)], packed[sizes[0] : sizes[0] + len(ends)] = slots, slots[ends]
        self._staging.copy_into(self._buffer[: len(packed)], packed)
        return self.take(*sizes)

    def take(self, size: int, ends_size: int = 0) -> AdapterRows:
        """The step in the buffer."""
        return AdapterRows(self._buffer[:size], self._buffer[size : size + ends_size], self._slots)


def adapter_rows(slots: LongArray, ends: LongArray) -> AdapterRows | None:
    """By the slot of each token: which tokens use which slot, also among those at `ends`; None: none uses any."""
    own = torch.from_numpy(slots.astype(np.int32))
    return AdapterRows(own, own[ends], int(slots.max())) if slots.any() else None


def logits_of(model: CausalLM, slots: LongArray, at: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes logits of the hidden states of some tokens, which have the same slot."""
    slot = int(slots[at.start])

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        slots = torch.full((len(hidden),), slot, dtype=torch.int32, device=hidden.device)
        return model.logits(hidden, lambda: group_rows(slots, slot))

    return logits if slot else model.logits
