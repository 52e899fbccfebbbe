"""The weights of a model after its start: swapped for those of another checkpoint, given back, and read again.

Owns which files the weights came from: after a release they are read from there again. Everything that can be wrong
with a checkpoint is found before the first byte in memory changes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from bough.core.errors import BoughError, EngineDeadError, ModelError, RequestError, ResourceError
from bough.core.model_config import ModelConfig
from bough.core.setting_checks import INSTEAD
from bough.core.settings import LOAD_FORMATS, Settings
from bough.executor.live_weights import LiveWeights
from bough.executor.load_model import LoadedWeights, cache_scales, initial_format, resolve_config
from bough.executor.machine import free_memory_bytes
from bough.layers.placement import ExpertRecord
from bough.layers.weights import WeightSlot
from bough.loader.load import check_share, check_weights, load_weights, open_source, packed_cache, packed_size
from bough.loader.locate import ModelFiles, locate
from bough.loader.source import WeightSource

# What may differ between checkpoints of one model: all else decides shapes or the forward pass.
FREE_FIELDS = ("context_length", "eos_token_ids", "dtype")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files that were found to fit the model."""

    files: ModelFiles
    load_format: str
    source: WeightSource


class WeightStore:
    """The memory of a model's weights, and where their content is."""

    def __init__(self, loaded: LoadedWeights, files: ModelFiles, settings: Settings) -> None:
        self._loaded, self._settings = loaded, settings
        self._files, self._load_format = files, initial_format(settings)
        self._slots = list(loaded.model.slots())
        self._held_bytes = loaded.weight_bytes
        self.experts = ExpertRecord(loaded.spread, loaded.config)
        self._released: list[tuple[torch.UntypedStorage, int]] = []  # with their size in bytes
        self.live = LiveWeights(loaded, files, settings.parallel)
        self.patched = False  # some are not those of the files
        self.rebalance_every = settings.parallel.enable_eplb and settings.parallel.eplb_rebalance_num_iterations

    @property
    def in_place(self) -> bool:
        """Whether a swap writes where the old weights are. Packed ones get other memory: their format may change."""
        return all(slot.packing is None for slot in self._slots)

    @property
    def slots(self) -> Sequence[WeightSlot]:
        return self._slots

    def patch(self, source: WeightSource) -> str:
        """Writes the tensors of a source that was found to fit."""
        names = {*source.names()}
        changed = [slot for slot in self._slots if slot.name in names]
        load_weights(changed, source, progress=False, device=self._loaded.device)
        if self._loaded.device.type == "cuda":  # the sender may free or change its tensors when it is answered
            torch.cuda.synchronize()
        self._held_bytes, self.patched = sum(slot.nbytes for slot in self._slots), True
        return f"{len(names)} tensors have other values."

    def find(self, model_path: str, load_format: str | None) -> Checkpoint:
        """Another checkpoint of the same model."""
        if not model_path:
            raise RequestError("model_path is empty; name a folder or file with the new weights.", field="model_path")
        if load_format is None:  # who gives a path does not mean random weights
            load_format = "auto" if self._load_format == "dummy" else self._load_format
        if load_format not in LOAD_FORMATS:
            known, hint = ", ".join(LOAD_FORMATS), INSTEAD["load_format"].get(load_format, "")
            text = f"load_format must be one of {known}, got {load_format!r}. {hint}"
            raise RequestError(text.rstrip(), field="load_format")
        with _unreadable():
            files = locate(model_path, progress=False, load_format=load_format)
            self._check_config(resolve_config(files, self._settings))
            return self._open(files, load_format)

    def fill(self, checkpoint: Checkpoint) -> None:
        """Reads the weights. What was packed when an engine started is mapped; nothing is packed for later starts,
        because checkpoints of a training run come and go."""
        packed = not self.in_place and checkpoint.load_format != "dummy"
        cache = packed_cache(checkpoint.files, self._settings.model.quantization, keep=False) if packed else None
        load_weights(self._slots, checkpoint.source, progress=False, device=self._loaded.device, cache=cache)
        self._files, self._load_format, self.patched = checkpoint.files, checkpoint.load_format, False
        self._held_bytes = sum(slot.nbytes for slot in self._slots)

    def rebalance(self) -> str:
        """Moves experts to where they had better be: a rank reads those that it gets from the files."""
        if self.patched:
            return "All experts stay where they are, because the files do not have the weights that came since."
        spread = self._loaded.spread
        better = spread.better()
        if better == [layer.slots for layer in spread.layers]:
            return "All experts stay where they are."
        with _unreadable():
            source = self._open(self._files, self._load_format).source
        before, places = [slot.name for slot in self._slots], [layer.slots for layer in spread.layers]
        spread.place(better)
        moved = list(self._loaded.model.slots())
        coming = [slot for slot, name in zip(moved, before, strict=True) if slot.name != name]
        try:
            check_weights(coming, source)
        except BoughError:
            spread.place(places)
            raise
        try:
            load_weights(coming, source, progress=False, device=self._loaded.device)
        except (BoughError, OSError) as error:  # what is overwritten cannot serve on
            text = f"Experts have moved in part: {error} Make the files readable and start again."
            raise EngineDeadError(text) from None
        self._slots = moved
        return f"This rank has read {len(coming)} tensors of experts that moved."

    def release(self) -> None:
        held = (part.untyped_storage() for slot in self._slots if slot.packing is None for part in slot.memory)
        storages = {storage.data_ptr(): storage for storage in held}.values()  # parts of one layer share theirs
        self._released, self._held_bytes = [(storage, storage.nbytes()) for storage in storages], 0
        for storage in storages:
            storage.resize_(0)
        for slot in self._slots:
            if slot.packing is not None:
                slot.packing.release()

    def restore(self) -> None:
        """Takes the memory again, at other addresses, and reads what it held. Nothing is taken if that fails."""
        with _unreadable():
            checkpoint = self._open(self._files, self._load_format)
        try:
            for storage, nbytes in self._released:
                storage.resize_(nbytes)
        except RuntimeError as error:
            for storage, _ in self._released:
                storage.resize_(0)
            raise ResourceError(f"There is not enough free memory for the weights: {error}") from None
        self.fill(checkpoint)
        self._released = []

    def _open(self, files: ModelFiles, load_format: str) -> Checkpoint:
        config = self._loaded.config
        source = open_source(files, config, load_format, self._loaded.device)
        check_share(self._slots, source, self._loaded.topology)
        if not self.in_place:  # packed weights are as wide as the checkpoint has them
            needed, _ = packed_size(source, self._settings.model.quantization)
            free = free_memory_bytes() + self._held_bytes
            if needed > free:
                text = f"The weights need {needed / 2**30:.2f} GiB, but only {free / 2**30:.2f} GiB are free."
                raise ResourceError(text)
        scales = self._loaded.cache_scales  # are part of captured graphs
        if scales is not None and cache_scales(self._settings, source, config) != scales:
            raise ModelError("The checkpoint has other scales for the KV cache; start another engine for it.")
        return Checkpoint(files, load_format, source)

    def _check_config(self, config: ModelConfig) -> None:
        for name in (field.name for field in fields(config) if field.name not in FREE_FIELDS):
            theirs, ours = getattr(config, name), getattr(self._loaded.config, name)
            if theirs != ours:
                raise ModelError(
                    f"The checkpoint is of another model: its {name} is {theirs}, that of the served model is {ours}. "
                    "Give one with the same configuration, or start another engine."
                )


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    """What the system says of files becomes what the user is told."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"The checkpoint cannot be read: {error}.") from None
