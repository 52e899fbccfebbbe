"""The adapters of a model in memory: read, put into slots, forgotten; and which tokens of a step use which slot."""

from __future__ import annotations

import numpy as np
import torch

from bough.attention.context import AdapterRows, Segments
from bough.core.control import AdapterCommand, PlaceAdapter
from bough.core.settings import LoraSettings
from bough.executor.layout import LongArray
from bough.executor.load_model import LoadedWeights
from bough.layers.adapters import Adapter, AdapterSlots
from bough.loader.adapters import read_adapter


class AdapterStore:
    """Adapters by name in the host's memory."""

    def __init__(self, loaded: LoadedWeights, slots: AdapterSlots, settings: LoraSettings) -> None:
        self._loaded, self._slots, self._settings = loaded, slots, settings
        self._adapters: dict[str, Adapter] = {}

    def obey(self, command: AdapterCommand) -> str:
        """Does the command; of an adapter that was loaded, what its content hashes to."""
        if isinstance(command, PlaceAdapter):
            self._slots.place(command.slot, self._adapters[command.name], self._loaded.dtype, self._loaded.device)
            return ""
        if command.path is None:
            del self._adapters[command.name]
            return ""
        found = read_adapter(command.path, self._loaded.config, self._slots.shapes(), self._settings)
        self._adapters[command.name] = found[0]
        return found[1]


def adapter_rows(slots: LongArray, ends: LongArray) -> AdapterRows | None:
    """By the slot of each token: which tokens use which slot, also among those at `ends`; None: none uses any."""
    return AdapterRows(_segments(slots), _segments(slots[ends])) if slots.any() else None


def _segments(slots: LongArray) -> Segments:
    used = np.unique(slots[slots > 0]).tolist()
    return tuple((slot, torch.from_numpy(np.flatnonzero(slots == slot))) for slot in used)
