"""What trainers do with the weights of an engine that runs: hand tensors over, and look at them.

Tensors have the checkpoint's names. They come in safetensors files of this user, most of them in shared memory, as
handles of a GPU's memory in such files, or from a trainer's group; never pickled. All ranks have found that they fit
before one of them writes.
"""

import functools
import os
import stat
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bough.core.control import JoinTrainer, LeaveTrainer, ReadWeight, ReceiveTensors, TakeTensors, TrainerCommand
from bough.core.errors import BoughError, RequestError
from bough.core.parallel_settings import ParallelSettings
from bough.distributed.cuda_ipc import BEGINNING, open_handles
from bough.distributed.weights_group import DEVICES, WeightsGroup, open_store
from bough.executor.load_model import LoadedWeights
from bough.kernels.quant_linear.packed import linear_library, structs_of
from bough.layers.weights import WeightSlot
from bough.loader.load import check_weights
from bough.loader.locate import ModelFiles
from bough.loader.source import DummySource, NamedSource, TensorSource, WeightSource
from bough.loader.vectors import BARE_NAMES
from bough.models.names import Stored, find_tensors, module_names
from bough.models.registry import FALLBACK, find_family

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Whose GGUF files have the numbers that safetensors have; others' hold norms, decays or the like in another form.
GGUF_ALIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HEAD = "lm_head.weight"


class LiveWeights:
    """One rank's side."""

    def __init__(self, loaded: LoadedWeights, files: ModelFiles, parallel: ParallelSettings) -> None:
        self._loaded, self._ranks, self._parallel = loaded, loaded.group, parallel
        self._trainers: dict[str, WeightsGroup] = {}
        self._alike = files.gguf is None or loaded.config.architecture in GGUF_ALIKE

    def open(self, command: TakeTensors | ReceiveTensors, slots: Sequence[WeightSlot]) -> WeightSource:
        """The tensors that are handed over, by the model's names. Raises on all ranks unless they fit on all."""
        if isinstance(command, ReceiveTensors):
            return self.together(lambda: self._fitting([self._received(command, slots)], slots))
        return self.together(lambda: self._fitting([self._of_file(Path(path)) for path in command.files], slots))

    def change_group(self, command: TrainerCommand) -> str:
        """Joins a trainer's group, in the place of one of the same name, or leaves it."""
        return self.together(lambda: self._join(command) if isinstance(command, JoinTrainer) else self._leave(command))

    def read(self, command: ReadWeight, slots: Sequence[WeightSlot]) -> str:
        """The rows of all tensor parallel ranks together."""
        values, counts = self.together(lambda: self._own_rows(command, slots))
        values, counts = self._ranks.all_reduce(values), self._ranks.all_reduce(counts)  # some rows are on several

        def whole() -> str:
            if not bool(counts.all()):
                raise RequestError(f"{command.name} is on ranks that cannot be asked together (pipelines, experts).")
            return msgspec.json.encode((values / counts).tolist()).decode()

        return self.together(whole)

    def together(self, act: Callable[[], T]) -> T:
        """What `act` returns if no rank's has raised."""
        result: T | BoughError
        try:
            result = act()
        except BoughError as error:
            result = error
            traceback.clear_frames(error.__traceback__)  # which hold memory of another process
        if self._ranks.all_groups.all_say(not isinstance(result, BoughError)):
            assert not isinstance(result, BoughError)
            return result
        refusal = result if isinstance(result, BoughError) else RequestError("Another rank cannot do it; see its log.")
        del result
        raise refusal

    def _join(self, command: JoinTrainer) -> str:
        name, size, first = command.group_name, command.world_size, command.rank_offset
        ranks, here = self._ranks.topology.ranks, self._loaded.device.type
        backend = command.backend or ("nccl" if here == "cuda" else "gloo")
        if self._parallel.dp_size > self._parallel.groups:
            raise RequestError("Replicas cannot share a group; give each an engine of its own, or use another way.")
        if not 1 <= first <= size - ranks:
            text = f"rank_offset must be 1 or more, and world_size at least {ranks} more, which the engine's ranks are."
            raise RequestError(text, field="rank_offset")
        if DEVICES.get(backend) not in ("cpu", here):
            raise RequestError("backend must be gloo, or nccl where the engine runs on GPUs.", field="backend")
        if name in self._trainers:
            self._trainers.pop(name).close()
        timeout_s = self._parallel.dist_timeout / 4  # all ranks give up before the others take one that has for lost
        store = open_store(command.master_address, command.master_port, size, timeout_s)
        self._trainers[name] = WeightsGroup(store, name, first + self._ranks.topology.rank, size, backend, timeout_s)
        return f"The engine is ranks {first} to {first + ranks - 1} of {name}."

    def _leave(self, command: LeaveTrainer) -> str:
        self._group_of(command.group_name).close()
        del self._trainers[command.group_name]
        return f"The engine has left {command.group_name}."

    def _group_of(self, name: str) -> WeightsGroup:
        if name not in self._trainers:
            text = f"There is no group {name!r}; make it first (/init_weights_update_group)."
            raise RequestError(text, field="group_name")
        return self._trainers[name]

    def _received(self, command: ReceiveTensors, slots: Sequence[WeightSlot]) -> Tensors:
        """What the trainer sends. What does not fit is taken and dropped: the trainer sends it in any case, and what it
        sends next must come next here."""
        group, declared, taken = self._group_of(command.group_name), _declared(command), dict[str, torch.Tensor]()
        objection: BoughError | None = None
        try:
            self._fitting([declared], slots)
        except BoughError as error:
            objection = error
        try:
            device = self._loaded.device if group.device == "cuda" else "cpu"
            for name, like in declared.items():
                tensor = group.broadcast(torch.empty_like(like, device=device))
                if objection is None:
                    taken[name] = tensor
        except (RequestError, RuntimeError) as error:  # the trainer is gone, or there is no memory
            self._trainers.pop(command.group_name).close()
            raise RequestError(f"{error} The old weights stay; make the group again.") from None
        if objection is not None:
            raise objection
        return taken

    def _of_file(self, path: Path) -> Tensors:
        """What a file of this user holds, mapped. It is opened once: what is checked is what is read."""
        try:
            with path.open("rb") as file:
                about, opened = os.fstat(file.fileno()), Path(f"/proc/self/fd/{file.fileno()}")
                if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                    raise RequestError(f"{path} is not a file of the user that the engine runs as.")
                if file.peek(len(BEGINNING)).startswith(BEGINNING):
                    shared = open_handles(file.read())
                    on_gpu = self._loaded.device.type == "cuda"  # a rank copies its own part
                    return shared if on_gpu else {name: tensor.cpu() for name, tensor in shared.items()}
                tensors: Tensors = load_file(opened if opened.exists() else path)
                return tensors
        except SafetensorError as error:
            text = f"These are no whole safetensors ({error}); bough.rl.shared_tensors writes such files, not pickles."
            raise RequestError(text) from None
        except (OSError, ValueError) as error:
            raise error if isinstance(error, BoughError) else RequestError(f"{path} cannot be read: {error}.") from None

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        model = DummySource(self._loaded.config)
        return {name: model.shape(name) for name in model.names()}

    def _find(self, names: Sequence[str]) -> dict[str, Stored]:
        if not self._alike:
            raise RequestError("This model's GGUF has other numbers than safetensors; start the engine from those.")
        config, family = self._loaded.config, find_family(self._loaded.config.architecture)
        known = {} if family is FALLBACK else module_names(family.names(config), config.moe)  # as trainers have them
        if config.vectors is not None and config.causal:
            known = {**BARE_NAMES, **known}
        found = find_tensors(known, names, keep_others=True)
        # Not computed: a tied head of its own, and the pooler that encoders without a classifier have.
        unused = {name for name, at in found.items() if not config.causal and "pooler" in at.name.split(".")}
        if unknown := found.keys() - self._shapes.keys() - unused - ({HEAD} if config.tied_embeddings else set()):
            raise RequestError(f"The model has no tensor {sorted(unknown)[0]!r}; use the names of its checkpoint.")
        return {name: at for name, at in found.items() if name in self._shapes}

    def _fitting(self, files: Sequence[Tensors], slots: Sequence[WeightSlot]) -> WeightSource:
        tensors = {name: tensor for file in files for name, tensor in file.items()}
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise RequestError(f"Tensor {name} is {tensor.dtype}; send one of {', '.join(map(str, DTYPES))}.")
        found = self._find(list(tensors))
        if not found:
            tied = " lm_head.weight is model.embed_tokens.weight in this model." if HEAD in tensors else ""
            raise RequestError(f"There is no tensor to update.{tied}")
        rows = {name: tensor.view(tensor.shape or (1,)) for name, tensor in tensors.items()}
        try:
            source = NamedSource(TensorSource(rows), found)
            shapes = {name: source.shape(name) for name in found}
        except IndexError:
            raise RequestError("A tensor has fewer dimensions than that of the checkpoint.") from None
        for name, shape in shapes.items():
            if shape != self._shapes[name]:
                raise RequestError(f"Tensor {name} has shape {list(shape)}, not {list(self._shapes[name])}.")
        check_weights([slot for slot in slots if slot.name in found], source)
        return source

    def _own_rows(self, command: ReadWeight, slots: Sequence[WeightSlot]) -> tuple[torch.Tensor, torch.Tensor]:
        """The first rows as far as this rank has them, and how often it has each value."""
        tied = command.name == HEAD and self._loaded.config.tied_embeddings
        (name, at), *others = self._find(["model.embed_tokens.weight" if tied else command.name]).items()
        if others or at != Stored(at.name):
            raise RequestError(f"{command.name} is kept in parts or in another order, which cannot be shown.")
        first, *width = self._shapes[name]
        values = torch.zeros(min(command.truncate_size, first), *width)
        counts = torch.zeros_like(values)
        for slot in (slot for slot in slots if slot.name == name):
            if slot.store is not None or slot.form is not None:
                raise RequestError(f"{command.name} is kept in other numbers, which cannot be shown.")
            rows, *columns = slot.index or (slice(None),)
            own = range(first)[rows]
            for place in own[: max(len(values) - own.start, 0)]:
                values[place][tuple(columns)] += _row(slot, place - own.start)
                counts[place][tuple(columns)] += 1
        return values.to(self._loaded.device), counts.to(self._loaded.device)


def _declared(command: ReceiveTensors) -> Tensors:
    """The tensors that the trainer says it sends, without memory."""
    names, shapes = command.names, command.shapes
    if not len(set(names)) == len(names) == len(command.dtypes) == len(shapes):
        raise RequestError("names, dtypes and shapes must be of the same length, and each name another.", field="names")
    dtypes = [getattr(torch, given.removeprefix("torch."), None) for given in command.dtypes]
    for given, dtype in zip(command.dtypes, dtypes, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise RequestError(f"{given!r} is no number format of torch.", field="dtypes")
    try:
        of_each = zip(names, shapes, dtypes, strict=True)
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in of_each}
    except RuntimeError as error:
        raise RequestError(f"shapes: {error}", field="shapes") from None


def _row(slot: WeightSlot, number: int) -> torch.Tensor:
    if slot.packing is None:
        return slot.target[number].float().cpu()
    values, weight = torch.empty(slot.packing.inputs), slot.packing.weight
    linear_library().bough_weight_row(structs_of([weight]), number, values.data_ptr())
    return values
