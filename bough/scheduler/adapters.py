"""LoRA adapters as the scheduler sees them: which are loaded, and which of them stand in the executor's slots.

Commands run in order with plans, so a slot may change as soon as the plans that use it are launched. Adapters are read
beside the plans, and requests wait here for theirs; `--lora-resolver` names a folder where unknown ones are looked up.
Cached prefixes belong to an adapter's content, not to its name.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from bough.core.control import ADAPTER_FILES, LoadAdapter, PlaceAdapter, ReadAdapter, Ticket
from bough.core.errors import BoughError, RequestError
from bough.core.files import user_path
from bough.core.plan import Executor
from bough.core.settings import LoraSettings
from bough.messages.outputs import Reply
from bough.messages.requests import Abort, ChangeAdapters, Generate
from bough.scheduler.control import means
from bough.scheduler.request import Request

LOOK_AHEAD = 64  # waiting requests whose adapters are brought to slots before their turn


class Loaded(NamedTuple):
    path: str
    content: str
    pinned: bool


class Loading(NamedTuple):
    """An adapter that is being read, and what waits for it: the command that named it, or requests."""

    path: str
    ticket: Ticket
    command: ChangeAdapters | None
    requests: list[Generate]

    @property
    def is_read(self) -> bool:
        return self.ticket.ready() and ((done := self.ticket.wait().done) is None or done())


class Adapters:
    """Without an executor there are none, and none can be loaded."""

    def __init__(
        self, executor: Executor | None = None, settings: LoraSettings | None = None, names: Collection[str] = ()
    ) -> None:
        """`names` mean the model itself, so no adapter can have them."""
        self._executor, self._settings, self._taken = executor, settings or LoraSettings(), names
        self._loaded: dict[str, Loaded] = {}
        self.loading: dict[str, Loading] = {}
        self._resolved: dict[str, None] = {}  # those that the resolver found, the one used longest ago first
        self._slots: dict[str, int] = {}  # by name, in the order in which they go
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
            if self._settings.lora_resolver is not None:
                load = f"put {' and '.join(ADAPTER_FILES)} into a folder of that name inside --lora-resolver"
            text = f"There is no adapter {name!r}; loaded are: {self._names}. Name one of them or the model, or {load}."
            raise RequestError(text, field="lora_path", status_code=404, err_type="NotFoundError")
        if name in self._resolved:
            self._resolved[name] = self._resolved.pop(name)
        # Namespaces that clients give are empty or hold a NUL, so none is like this.
        return hashlib.sha256(f"{self._loaded[name].content}{given}".encode()).hexdigest()

    def place(self, request: Request, running: Iterable[Request]) -> bool:
        """Sees to it that the request's adapter stands in a slot; False: `running` requests use them all."""
        slot = self._slots.get(request.adapter, 0) or self._fill(request.adapter, {other.adapter for other in running})
        if slot:
            if self._settings.lora_eviction_policy == "lru":
                self._slots.pop(request.adapter, None)
            self._slots[request.adapter] = slot
            request.take_slot(slot)
        return slot > 0

    def place_ahead(self, waiting: Iterable[Request], running: Iterable[Request]) -> None:
        """Brings the adapter of a waiting request to a slot that none of those uses, so that its turn need not wait for
        the copy. One in a step: copies must not hold up the others."""
        soon = [request.adapter for request in islice(waiting, LOOK_AHEAD) if request.adapter]
        absent = next((name for name in soon if name not in self._slots), None)
        if absent is not None and (slot := self._fill(absent, {*soon, *(request.adapter for request in running)})):
            self._slots[absent] = slot

    def hold(self, message: Generate) -> bool:
        """Whether the request waits for its adapter to be read, which begins here if the resolver finds it."""
        name = message.adapter
        if not name or name in self._loaded or self._executor is None:
            return False
        if name not in self.loading:
            if self._settings.lora_resolver is None or (path := find_below(self._settings.lora_resolver, name)) is None:
                return False
            self.loading[name] = Loading(path, self._executor.control(ReadAdapter(name, path)), None, [])
        self.loading[name].requests.append(message)
        return True

    def drop(self, abort: Abort) -> list[Generate]:
        """The waiting requests that an abort means; they wait no longer."""
        waiting = (request for loading in self.loading.values() for request in loading.requests)
        meant = [request for request in waiting if means(abort, request)]
        for request in meant:
            self.loading[request.adapter].requests.remove(request)
        return meant

    def finished(self, requests: Iterable[Request]) -> Iterator[tuple[Generate | Reply, RequestError | None]]:
        """Loads what was read. Yields the command's reply, and the requests that waited, each with what is wrong with
        its adapter, if something is."""
        for name in [name for name, loading in self.loading.items() if loading.is_read]:
            (path, _, command, waiting), error = self.loading.pop(name), None
            try:
                if command is None:
                    self._make_room({request.adapter for request in requests})
                self.load(name, path, command is not None and command.pinned)
            except BoughError as found:
                error = found if isinstance(found, RequestError) else RequestError(str(found), field="lora_path")
            else:
                self._resolved |= {name: None} if command is None else {}
            if command is not None:
                yield Reply(command.call, error is None, str(error or f"The adapter {name!r} is loaded.")), error
            yield from ((request, error) for request in waiting)

    def obey(self, message: ChangeAdapters, requests: Iterable[Request]) -> Reply | None:
        """What to answer; None: the adapter is being read, and `finished` has the answer."""
        name, path = message.name, message.path
        try:
            if path is not None:
                executor = self._check_new(name, message.pinned)
                self.loading[name] = Loading(path, executor.control(ReadAdapter(name, path)), message, [])
                return None
            self.unload(name, sum(request.adapter == name for request in requests))
        except BoughError as error:
            return Reply(message.call, False, str(error))
        return Reply(message.call, True, f"The adapter {name!r} is unloaded.")

    def load(self, name: str, path: str, pinned: bool = False) -> None:
        done = self._check_new(name, pinned).control(LoadAdapter(name, path)).wait()
        self._loaded[name] = Loaded(path, done.content, pinned)

    def _check_new(self, name: str, pinned: bool) -> Executor:
        """What loads the adapter, if one of this name can be loaded."""
        if self._executor is None:
            raise RequestError("This engine takes no adapters; start it with --enable-lora.")
        if not name or name in self._taken:
            raise RequestError(f"lora_name {name!r} is empty or means the model itself; take another.")
        if name in self._loaded or name in self.loading:
            raise RequestError(f"lora_name {name!r} is loaded already; take another, or unload that one.")
        most, slots = self._settings.max_loaded_loras, self._settings.max_loras_per_batch
        if most is not None and len(self._loaded) >= most:
            text = f"{most} adapters are loaded, which is the most (--max-loaded-loras); unload one, or try again."
            raise RequestError(text, field="lora_path", status_code=503, err_type="ServiceUnavailableError")
        if pinned and sum(adapter.pinned for adapter in self._loaded.values()) >= slots - 1:
            raise RequestError(f"Of {slots} slots (--max-loras-per-batch), one must stay free of pinned adapters.")
        return self._executor

    def _make_room(self, used: set[str]) -> None:
        """Where no more adapters may be in memory, one goes that the resolver found and that no request uses."""
        idle = next((name for name in self._resolved if name not in used), None)
        if idle is not None and len(self._loaded) == self._settings.max_loaded_loras:
            self.unload(idle)

    def unload(self, name: str, users: int = 0) -> None:
        """Of an adapter that so many requests use."""
        if name not in self._loaded:
            raise RequestError(f"There is no adapter {name!r}; loaded are: {self._names}.")
        if users:
            raise RequestError(f"{users} requests use the adapter {name!r}; try again when they have ended.")
        assert self._executor is not None
        self._executor.control(LoadAdapter(name, None)).wait()
        del self._loaded[name]
        self._resolved.pop(name, None)
        if slot := self._slots.pop(name, 0):
            self._free.append(slot)

    def _fill(self, name: str, used: set[str]) -> int:
        """Puts an adapter into a slot, free or with an adapter that is not used; 0: there is none."""
        assert self._executor is not None
        idle = (other for other in self._slots if other not in used and not self._loaded[other].pinned)
        slot = self._free.pop() if self._free else self._slots.pop(next(idle, ""), 0)
        if slot:
            self._executor.control(PlaceAdapter(name, slot))
        return slot


def find_below(folder: str, name: str) -> str | None:
    """The path of the adapter of this name inside the folder, if there is one. Neither names nor links lead out."""
    root, parts = user_path(folder).resolve(), name.split("/")
    if not all(parts) or {".", ".."} & {*parts}:
        return None
    try:
        files = [(root / name / file).resolve(strict=True) for file in ADAPTER_FILES]
    except (OSError, ValueError, RuntimeError):  # it is not there; the name is no path; links lead in a circle
        return None
    return str(root / name) if all(file.is_relative_to(root) for file in files) else None
