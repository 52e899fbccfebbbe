"""LoRA adapters as the scheduler sees them: which are loaded, and which of them stand in the executor's slots.

An adapter is loaded into the host's memory. Before a request of it runs, the adapter is put into a slot, in the place
of the one that was used longest ago and has no running request. Commands run in order with plans, so a slot may change
as soon as the plans that use it are launched. Cached prefixes belong to the adapter's content, not to its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from bough.core.control import DropAdapter, LoadAdapter, PlaceAdapter
from bough.core.errors import BoughError, RequestError
from bough.core.plan import Executor
from bough.core.settings import LoraSettings
from bough.messages.outputs import Reply
from bough.messages.requests import LoadLora, UnloadLora
from bough.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Loaded:
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
    def facts(self) -> dict[str, object]:
        """The paths of those that are loaded; nothing where there can be none."""
        return {} if self._executor is None else {"loaded_adapters": {n: a.path for n, a in self._loaded.items()}}

    def namespace(self, name: str, given: str) -> str:
        """Where a request's prefixes are cached; a `RequestError` if it names an adapter that is not there."""
        if not name:
            return given
        if self._executor is None:
            raise RequestError(
                f"There is no adapter {name!r}: this engine has none; start it with --enable-lora.", field="lora_path"
            )
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise RequestError(
                f"There is no adapter {name!r}; loaded are: {known}. Name one of them or the model, or load it "
                "(/load_lora_adapter).",
                field="lora_path",
                status_code=404,
                err_type="NotFoundError",
            )
        # Namespaces that clients give are empty or hold a NUL, so none is like this.
        return hashlib.sha256(f"{self._loaded[name].content}{given}".encode()).hexdigest()

    def place(self, request: Request, running: Iterable[Request]) -> bool:
        """Sees to it that the request's adapter stands in a slot; False: `running` requests use them all."""
        name = request.adapter
        slot = self._slots.pop(name, 0)
        if not slot:
            slot = self._vacate({other.adapter for other in running})
            if not slot:
                return False
            assert self._executor is not None
            self._executor.control(PlaceAdapter(name, slot))
        self._slots[name] = slot
        request.take_slot(slot)
        return True

    def obey(self, message: LoadLora | UnloadLora, requests: Iterable[Request]) -> Reply:
        try:
            if isinstance(message, LoadLora):
                self.load(message.name, message.path, pinned=message.pinned)
                return Reply(message.call, True, f"The adapter {message.name!r} is loaded.")
            self._unload(message.name, sum(request.adapter == message.name for request in requests))
            return Reply(message.call, True, f"The adapter {message.name!r} is unloaded.")
        except BoughError as error:
            return Reply(message.call, False, str(error))

    def load(self, name: str, path: str, *, pinned: bool = False) -> None:
        if self._executor is None:
            raise RequestError("This engine takes no adapters; start it with --enable-lora.")
        if not name:
            raise RequestError("lora_name is empty; give the adapter a name.", field="lora_name")
        if name in self._loaded:
            raise RequestError(f"An adapter {name!r} is loaded already; unload it first, or take another name.")
        most, slots = self._settings.max_loaded_loras, self._settings.max_loras_per_batch
        if most is not None and len(self._loaded) >= most:
            raise RequestError(f"{most} adapters are loaded, which is the most (--max-loaded-loras); unload one.")
        if pinned and sum(adapter.pinned for adapter in self._loaded.values()) >= slots - 1:
            raise RequestError(
                f"Pinned adapters must leave one of the {slots} slots to others (--max-loras-per-batch); load "
                f"{name!r} without pinned."
            )
        done = self._executor.control(LoadAdapter(name, path)).wait()
        self._loaded[name] = Loaded(path, done.content, pinned)

    def _unload(self, name: str, users: int) -> None:
        if name not in self._loaded:
            raise RequestError(f"There is no adapter {name!r}; loaded are: {', '.join(self._loaded) or 'none'}.")
        if users:
            raise RequestError(
                f"{users} requests use the adapter {name!r}; wait until they have ended or abort them "
                "(/abort_request), and try again."
            )
        assert self._executor is not None
        self._executor.control(DropAdapter(name)).wait()
        del self._loaded[name]
        if slot := self._slots.pop(name, 0):
            self._free.append(slot)

    def _vacate(self, used: set[str]) -> int:
        """A slot that no running request uses; 0: there is none."""
        if self._free:
            return self._free.pop()
        idle = (name for name in self._slots if name not in used and not self._loaded[name].pinned)
        name = next(idle, None)
        return 0 if name is None else self._slots.pop(name)
