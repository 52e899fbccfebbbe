"""The tier below the host's memory: runs of cached prefixes go to a store, and come back for requests that begin so.

A request waits here, before the queue, while a thread reads its runs, as long as `--hicache-storage-prefetch-policy`
says; others pass it by. What has come is put into the host's tier, from which requests take it like anything there.
A store may be attached and detached while the engine runs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np

from bough.constrained.interface import Ticket
from bough.core.daemon_thread import in_daemon_thread
from bough.core.errors import SettingsError
from bough.core.plan import HostMemory, IntArray, Limits
from bough.core.settings import MemorySettings
from bough.messages.outputs import Reply
from bough.messages.requests import ChangeStorage, Generate
from bough.scheduler.handover import Handover, Passing
from bough.scheduler.host_tier import CopyRate, TieredCache
from bough.scheduler.request import Request
from bough.scheduler.store_events import StoreEvents
from bough.storage.backends import open_store
from bough.storage.store import HEADER, RUN_TOKENS, Buffer, Store, log, run_keys

RECENT = 1 << 16  # names of runs that are in the store, as far as is known
QUEUE_BYTES = 1 << 30  # of runs that wait to be written
FETCH_S, FETCH_RUN_S = 1.0, 0.0625  # that the policy `timeout` waits, and for each run
NO_STORE: dict[str, Any] = dict.fromkeys(("hicache_storage_backend", "hicache_storage_backend_extra_config"))
SHOWN = "hicache_storage_backend", "hicache_storage_prefetch_policy", "hicache_write_policy"


class Fetch:
    """Runs of `run_bytes` that are read one after the other: with `state_bytes`, up to the last one behind which there
    is a recurrent state, which is read first."""

    def __init__(self, keys: Sequence[str], run_bytes: int, state_bytes: int = 0) -> None:
        self.keys, self._run_bytes, self._state_bytes = keys, run_bytes, state_bytes
        self.runs: list[Buffer] = []  # the first ones, as far as they were found
        self.count = len(keys)  # that are read
        self.state: Buffer | None = None
        self.seconds = 0.0  # that reading them took
        self.stopped = False  # then no further one is begun
        self.future: Future[None] = Future()
        self._deadline = time.monotonic() + FETCH_S + FETCH_RUN_S * len(keys)

    def settled(self, policy: str) -> bool:
        """Whether its request waits no longer, by `--hicache-storage-prefetch-policy`."""
        late = policy == "timeout" and time.monotonic() >= self._deadline
        return late or policy == "best_effort" or self.stopped or self.future.done()

    def read(self, store: Store) -> None:
        while self._state_bytes and self.count and self.state is None:
            self.state = self._read(store, state_key(self.keys[self.count - 1]), self._state_bytes, 0)
            self.count -= self.state is None
        for key in self.keys[: self.count]:
            run = self._read(store, key, self._run_bytes)
            if run is None:
                return
            self.runs.append(run)

    def _read(self, store: Store, key: str, size: int, runs: int = 1) -> Buffer | None:
        content, began = np.empty(size, dtype=np.uint8), time.monotonic()
        if self.stopped or not store.get([key], [content], runs):
            return None
        self.seconds += time.monotonic() - began
        return content


class Transfers:
    """Runs on their way between buffers and a store, off the scheduler's thread: one thread writes, another reads. At
    most `most_bytes` wait to be written; what comes beyond is dropped and counted."""

    def __init__(self, store: Store, most_bytes: int) -> None:
        self.store, self.dropped, self._most_bytes = store, 0, most_bytes
        self._waiting: dict[Future[int], int] = {}  # with their bytes
        self._writer, self._reader = (ThreadPoolExecutor(1, f"bough-store-{name}") for name in ("writes", "reads"))

    @property
    def writing(self) -> bool:
        return not all(future.done() for future in self._waiting)

    def put(self, keys: Sequence[str], buffers: Sequence[Buffer], runs: int = 1) -> Future[int] | None:
        """The caller holds the buffers until this is done. None: dropped."""
        self._waiting = {future: size for future, size in self._waiting.items() if not future.done()}
        size = sum(buffer.nbytes for buffer in buffers)
        if sum(self._waiting.values()) + size > self._most_bytes:
            self.dropped += len(keys)
            return None
        future = self._submit(self._writer, self.store.put, keys, buffers, runs)
        self._waiting[future] = size
        return future

    def remove(self, keys: Sequence[str]) -> None:
        """When what waits has been written."""
        self._waiting[self._submit(self._writer, self.store.remove, keys)] = 0

    def fetch(self, keys: Sequence[str], run_bytes: int, state_bytes: int = 0) -> Fetch:
        fetch = Fetch(keys, run_bytes, state_bytes)
        fetch.future = self._submit(self._reader, fetch.read, self.store)
        return fetch

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[..., Any], *given: Any) -> Future[Any]:
        """Nobody asks what each has come to, so what goes wrong is told here."""
        future = thread.submit(work, *given)
        future.add_done_callback(lambda done: self.store.failed(done.exception()))
        return future

    def close(self) -> None:
        for thread in (self._reader, self._writer):
            thread.shutdown()  # when it has done what waits
        self.store.close()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request may find in the store, from its run `first` on."""

    backend: str
    fetch: Fetch
    identity: tuple[str, ...]
    tokens: IntArray
    first: int


def open_tier(limits: Limits, memory: MemorySettings, identity: Sequence[str]) -> StoreTier:
    """`identity` is what the keys and values of given tokens depend on, beside the layout of pages."""
    tier = StoreTier(limits, memory, identity)
    if memory.hicache_storage_backend is not None:
        tier.transfers = tier.open(memory)
    return tier


class StoreTier(Handover):
    """Owns the store, if one is attached, the fetches under way, and requests that wait for theirs."""

    transfers: Transfers  # while one is

    def __init__(self, limits: Limits, memory: MemorySettings, identity: Sequence[str]) -> None:
        super().__init__()
        self._memory = memory
        self._change: tuple[ChangeStorage, MemorySettings, Future[Any]] | None = None  # what a store does may take long
        self.reply: Callable[[Reply], None] = log.info
        layout = ("by layer", limits.page_size, limits.page_bytes, limits.ranks, limits.cache_dtype, limits.groups)
        self._identity = ("", *identity, *map(str, layout))
        self._run_pages = RUN_TOKENS // limits.page_size
        self._page_bytes = [limits.copied_bytes(group) for group in range(len(limits.groups))]
        self._states = [number for number, group in enumerate(limits.groups) if group.kind == "state"]
        self._kv = [number for number in range(len(limits.groups)) if number not in self._states]
        self.run_bytes = self._run_pages * sum(self._page_bytes[group] for group in self._kv)
        self.state_bytes = sum(self._page_bytes[group] for group in self._states)
        self._recent: set[str] = set()
        self._wanted: dict[Request, Wanted] = {}
        self._events = StoreEvents(None, None, RUN_TOKENS, limits.page_size)

    def attach(self, *parts: Any) -> None:
        super().attach(*parts)
        assert isinstance(self._batch.cache, TieredCache)
        self._cache = self._batch.cache
        self._use(self._memory)

    def open(self, memory: MemorySettings, check: bool = False) -> Transfers:
        """With `check` it must answer; when an engine starts, its server may come later."""
        store = open_store(str(memory.hicache_storage_backend), memory.hicache_storage_backend_extra_config)
        if not HEADER.size + (size := max(self.run_bytes, self.state_bytes)) <= store.max_bytes:
            raise SettingsError(f"A stored run takes {size} bytes; --hicache-storage-backend needs a larger max_bytes.")
        if check:
            store.ask("0" * 64)
        return Transfers(store, QUEUE_BYTES)

    def close(self) -> None:
        if self._memory.hicache_storage_backend is not None:
            self.transfers.close()

    def offer(self, tokens: IntArray, namespace: str, pages: Sequence[IntArray], buffers: HostMemory) -> None:
        count = self._run_pages
        if len(self._recent) > RECENT:
            self._recent.clear()
        keys = run_keys((*self._identity, namespace), tokens)
        self._events.describe(keys, tokens, namespace)
        for number, key in enumerate(keys):
            slots = [of_group[number * count : (number + 1) * count] for of_group in pages]
            self._put(key, self._kv, count, slots, buffers)
            if self._states:
                behind = [of_group[count - 1 :] for of_group in slots]
                self._put(state_key(key), self._states, 1, behind, buffers)

    def _put(self, key: str, groups: Sequence[int], count: int, slots: Sequence[IntArray], buffers: HostMemory) -> None:
        """Unless it is there, or not whole: windows may have left pages behind, and few tokens have a state."""
        if key in self._recent or min(np.count_nonzero(slots[group]) for group in groups) < count:
            return
        content = np.empty(count * sum(self._page_bytes[group] for group in groups), dtype=np.uint8)
        for group, part in self._parts(content, groups, count):
            np.take(buffers[group], slots[group], axis=0, out=part, mode="clip")
        if self.transfers.put([key], [content], int(groups is self._kv)) is not None:
            self._recent.add(key)

    def forget(self, tokens: IntArray, namespace: str) -> None:
        keys = run_keys((*self._identity, namespace), tokens)
        keys += [state_key(key) for key in keys if self._states]
        self._recent.difference_update(keys)
        self.transfers.remove(keys)

    @property
    def figures(self) -> dict[str, float]:
        counts, dropped = self.transfers.store.counts, self.transfers.dropped
        return {
            "hicache_storage_read_tokens_total": counts["found"] * RUN_TOKENS,
            "hicache_storage_written_tokens_total": counts["written"] * RUN_TOKENS,
            "hicache_storage_dropped_runs_total": counts["dropped"] + dropped,
            "hicache_storage_corrupt_runs_total": counts["corrupt"],
            "hicache_storage_failures_total": counts["failures"],
        }

    @property
    def busy(self) -> bool:
        news = self._events.seen or (self._events.on and self.transfers.writing)
        return bool(self._wanted or self._cache.under_way or self._change or news)

    def enter(self, request: Request, message: Generate, ticket: Ticket | None) -> bool:
        return self.wait(request, ticket)

    def wait(self, request: Request, ticket: Ticket | None) -> bool:
        if (backend := self._memory.hicache_storage_backend) is None:
            return False
        tokens, identity, host = request.tokens[: request.match_cap].copy(), self._identity, self._cache.host.tree
        keys = run_keys((*identity, request.namespace), tokens)
        on_host = host.match_length(tokens, request.namespace)
        known = max(on_host, self._cache.tree.match_length(tokens, request.namespace))
        first, more = on_host // RUN_TOKENS, len(keys) * RUN_TOKENS - known
        nbytes, cache = (len(keys) - first) * self.run_bytes + self.state_bytes, self._cache
        if more <= 0 or not self._rate.pays(nbytes, more, cache.tokens_per_s, cache.rate.seconds(nbytes)):
            return False
        self._events.describe(keys, tokens, request.namespace)
        fetch = self.transfers.fetch(keys[first:], self.run_bytes, self.state_bytes)
        self._wanted[request] = Wanted(backend, fetch, identity, tokens, first)
        if self._memory.hicache_storage_prefetch_policy != "best_effort":
            self[request] = ticket
        return request in self

    def leave(self, request: Request) -> None:
        super().leave(request)
        self._wanted[request].fetch.stopped = True

    def passed(self) -> list[Passing]:
        passing, policy = list[Passing](), self._memory.hicache_storage_prefetch_policy
        for request, wanted in list(self._wanted.items()):
            if wanted.fetch.future.done() or (request in self and wanted.fetch.settled(policy)):
                wanted.fetch.stopped = True
                del self._wanted[request]
                self._adopt(request, wanted)
                if request in self:
                    passing.append((request, self.pop(request), None))
        if self._change is not None and self._change[2].done():
            self._end_change(*self._change)
        self._events.tell()
        return passing

    def _adopt(self, request: Request, wanted: Wanted) -> None:
        """Puts what has come into the host's tier, unless it does not fit any more what is there."""
        runs, state, count = list(wanted.fetch.runs), wanted.fetch.state, self._run_pages
        keys, first, last = wanted.fetch.keys, wanted.first, wanted.first + len(runs) - 1
        self._rate.learn(len(runs) * self.run_bytes + (0 if state is None else state.nbytes), wanted.fetch.seconds)
        self._recent.update(keys[: len(runs)])
        self._recent.difference_update(keys[len(runs) :], map(state_key, keys[len(runs) :]))
        host, namespace = self._cache.host.tree, request.namespace
        known = host.match_length(wanted.tokens, namespace)
        partial = self._states and len(runs) < wanted.fetch.count  # the state is that behind the last one
        if not runs or partial or wanted.identity != self._identity or known < first * RUN_TOKENS:
            return
        for number, run in enumerate(runs, first):
            pages = np.arange(1 - number * count, count + 1, dtype=np.int32).clip(0)
            offered, content = [pages] * len(self._page_bytes), [run] * len(self._page_bytes)
            for group, part in self._parts(run, self._kv, count):
                content[group] = part
            for group, part in () if state is None else self._parts(state, self._states, 1):
                offered[group], content[group] = pages // count * (number == last), part
            self._cache.adopt(wanted.tokens[: (number + 1) * RUN_TOKENS], namespace, offered, content)
        request.count_stored(host.match_length(wanted.tokens, namespace) - known, wanted.backend)

    def weights_changed(self) -> None:
        """Nobody else can tell by which weights runs are from now on: a path may hold others later."""
        self._identity = (secrets.token_hex(16), *self._identity[1:])
        self._events.withdraw()

    def change_storage(self, message: ChangeStorage) -> tuple[bool, str] | None:
        now, memory = self._memory, replace(self._memory, **message.settings)
        match message.action, now.hicache_storage_backend:
            case _ if self._change is not None:
                return False, "The store is being changed already; try again when that is done."
            case "attach", None:
                future: Future[Any] = in_daemon_thread(self.open, memory, True)
            case "attach", attached if any(getattr(memory, name) != getattr(now, name) for name in NO_STORE):
                return False, f"A store ({attached}) is attached; detach it first."
            case "attach", attached:
                self._use(memory)
                return True, f"This store ({attached}) is attached already; its policies are as asked."
            case action, None:
                return action == "detach", "No store is attached."
            case "detach", _:
                memory = replace(now, **NO_STORE)
                self._use(memory)
                future = in_daemon_thread(self.transfers.close)
            case _:
                future = in_daemon_thread(self.transfers.store.clear)
        self._change = message, memory, future
        return None

    def _end_change(self, message: ChangeStorage, memory: MemorySettings, future: Future[Any]) -> None:
        self._change, error, done = None, future.exception(), f"{message.action}ed"
        if error is None:
            self.transfers = future.result() or self.transfers
            self._events.withdraw()
            self._use(memory)
            self.reply(Reply(message.call, True, f"The store is {done}."))
        else:
            log.warning("the store cannot be %s", done, exc_info=error)
            self.reply(Reply(message.call, False, f"The store cannot be {done}: {str(error).rstrip('.')}."))

    def _use(self, memory: MemorySettings) -> None:
        """Requests that wait go on with what has come."""
        if memory.hicache_write_policy != self._memory.hicache_write_policy:
            self._cache.use_policy(memory.hicache_write_policy)
        self._memory, self._rate, backend = memory, CopyRate(), memory.hicache_storage_backend
        attached = backend is not None
        if backend != self._events.backend:
            self._events.withdraw()
            self._events = StoreEvents(self._cache.on_event, backend, RUN_TOKENS, self._cache.page_size)
            if self._events.on:
                self.transfers.store.watch(self._events.seen.append)
        self._cache.below = self if attached else None
        self._cache.run_tokens = RUN_TOKENS if attached and self._states else TieredCache.run_tokens
        self.counts |= {name: getattr(memory, name) for name in SHOWN}
        self._recent.clear()
        self._wanted = {request: wanted for request, wanted in self._wanted.items() if request in self}
        for wanted in self._wanted.values():
            wanted.fetch.stopped = True

    def _parts(self, content: Buffer, groups: Sequence[int], count: int) -> Iterator[tuple[int, Buffer]]:
        """Each of these groups with its pages: [pages, bytes]."""
        sizes = [self._page_bytes[group] for group in groups]
        for group, part, size in zip(groups, np.split(content, np.cumsum(sizes[:-1]) * count), sizes, strict=True):
            yield group, part.reshape(count, size)


class StoreBehind(Handover):
    """A side of a pair, and the tier that its requests come to behind it: those that it does not take, or passes on."""

    def __init__(self, side: Handover, tier: StoreTier) -> None:
        super().__init__()
        self._side, self._tier, self._both = side, tier, (side, tier)
        self.counts, self.check, self.launched = side.counts, side.check, side.launched  # type: ignore[method-assign]
        self.weights_changed, self.change_storage = tier.weights_changed, tier.change_storage  # type: ignore[method-assign]
        tier.counts = side.counts

    def __contains__(self, request: object) -> bool:
        return request in self._side or request in self._tier

    def __iter__(self) -> Iterator[Request]:
        return chain(self._side, self._tier)

    def __len__(self) -> int:
        return len(self._side) + len(self._tier)

    def attach(self, *parts: Any) -> None:
        for each in self._both:
            each.attach(*parts)

    @property
    def busy(self) -> bool:
        return self._side.busy or self._tier.busy

    def enter(self, request: Request, message: Generate, ticket: Ticket | None) -> bool:
        return self._side.enter(request, message, ticket) or self._tier.wait(request, ticket)

    def leave(self, request: Request) -> None:
        (self._side if request in self._side else self._tier).leave(request)

    def passed(self) -> list[Passing]:
        handed = ((each[2] is None and self._tier.wait(*each[:2]), each) for each in self._side.passed())
        return [*self._tier.passed(), *(each for waits, each in handed if not waits)]


def state_key(key: str) -> str:
    """The name of the recurrent state behind a run."""
    return blake2b(bytes.fromhex(key), digest_size=32, person=b"state").hexdigest()
