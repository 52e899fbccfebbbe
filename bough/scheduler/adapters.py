"""LoRA adapters as the scheduler sees them: which are loaded, and which of them stand in the executor's slots.

Commands run in order with plans, so a slot may change as soon as the plans that use it are launched. Cached prefixes
belong to an adapter's content, not to its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from bough.core.control import LoadAdapter, PlaceAdapter
from bough.core.errors import BoughError, RequestError
from bough.core.plan import Executor
from bough.core.settings import LoraSettings
from bough.messages.outputs import Reply
from bough.messages.requests import ChangeAdapters
from bough.scheduler.request import Request


class Loaded(NamedTuple):
    path: str
    content: str
    pinned: bool


class Adapters:
    """Without an executor there are none, and none can be loaded."""

    def __init__(self, executor: Executor | None = None, settings: LoraSettings | None = None) -> None:
        self._executor, self._settings = executor, settings or LoraSettings()
        self._loaded: dict[str, Loaded] = {}
        self._slots: dict[str, int] = {}  # by name, the one used longest ago first
        self._free = list(range(self._settings.max_loras_per_batch, 0, -1))

    @property
    def _names(self) -> str:
        return ", ".join(self._loaded) or "none"

    @property
    def facts(self) -> dict[str, object]:
        """The paths of those that are loaded; nothing where there can be none."""
        return {} if self._executor is None else {"loaded_adapters": {n: a.path for n, a in self._loaded.items()}}

    def namespace(self, name: str, given: str) -> str:
        """Where a request's prefixes are cached; a `RequestError` if it names an adapter that is not there."""
        if not name:
            return given
        if name not in self._loaded:
            load = "load it (/load_lora_adapter)" if self._executor is not None else "start with --enable-lora"
            text = f"There is no adapter {name!r}; loaded are: {self._names}. Name one of them or the model, or {load}."
            raise RequestError(text, field="lora_path", status_code=404, err_type="NotFoundError")
        # Namespaces that clients give are empty or hold a NUL, so none is like this.
        return hashlib.sha256(f"{self._loaded[name].content}{given}".encode()).hexdigest()

    def place(self, request: Request, running: Iterable[Request]) -> bool:
        """Sees to it that the request's adapter stands in a slot; False: `running` requests use them all."""
        slot = self._slots.pop(request.adapter, 0)
        if not slot and (slot := self._vacate({other.adapter for other in running})):
            assert self._executor is not None
            self._executor.control(PlaceAdapter(request.adapter, slot))
        if slot:
            self._slots[request.adapter] = slot
            request.take_slot(slot)
        return slot > 0

    def obey(self, message: ChangeAdapters, requests: Iterable[Request]) -> Reply:
        name = message.name
        try:
            if message.path is not None:
                self.load(name, message.path, message.pinned)
            else:
                self.unload(name, sum(request.adapter == name for request in requests))
        except BoughError as error:
            return Reply(message.call, False, str(error))
        return Reply(message.call, True, f"The adapter {name!r} is {'un' if message.path is None else ''}loaded.")

    def load(self, name: str, path: str, pinned: bool = False) -> None:
        if self._executor is None:
            raise RequestError("This engine takes no adapters; start it with --enable-lora.")
        if not name or name in self._loaded:
            raise RequestError(f"lora_name {name!r} is empty or loaded already; take another, or unload that one.")
        most, slots = self._settings.max_loaded_loras, self._settings.max_loras_per_batch
        if most is not None and len(self._loaded) >= most:
            raise RequestError(f"{most} adapters are loaded, which is the most (--max-loaded-loras); unload one.")
        if pinned and sum(adapter.pinned for adapter in self._loaded.values()) >= slots - 1:
            raise RequestError(f"Of {slots} slots (--max-loras-per-batch), one must stay free of pinned adapters.")
        done = self._executor.control(LoadAdapter(name, path)).wait()
        self._loaded[name] = Loaded(path, done.content, pinned)

    def unload(self, name: str, users: int = 0) -> None:
        """Of an adapter that so many requests use."""
        if name not in self._loaded:
            raise RequestError(f"There is no adapter {name!r}; loaded are: {self._names}.")
        if users:
            raise RequestError(f"{users} requests use the adapter {name!r}; try again when they have ended.")
        assert self._executor is not None
        self._executor.control(LoadAdapter(name, None)).wait()
        del self._loaded[name]
        if slot := self._slots.pop(name, 0):
            self._free.append(slot)

    def _vacate(self, used: set[str]) -> int:
        """A slot that no running request uses; 0: there is none."""
        if self._free:
            return self._free.pop()
        idle = (name for name in self._slots if name not in used and not self._loaded[name].pinned)
        return self._slots.pop(next(idle, ""), 0)
