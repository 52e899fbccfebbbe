"""Runs on their way between buffers and a store, off the scheduler's thread: one thread writes, another reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from bough.storage.store import Buffer, Store

FETCH_S, FETCH_RUN_S = 1.0, 0.0625  # that the policy `timeout` waits, and for each run


class Fetch:
    """Runs that are read one after the other; the caller holds their buffers until `future` is done."""

    def __init__(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> None:
        self.got, self.stopped = 0, False  # how many of the first runs; once stopped, no further one is begun
        self.future: Future[None] = Future()
        self._runs, self._deadline = (keys, buffers), time.monotonic() + FETCH_S + FETCH_RUN_S * len(keys)

    def settled(self, policy: str) -> bool:
        """Whether its request waits no longer, by `--hicache-storage-prefetch-policy`."""
        late = policy == "timeout" and time.monotonic() >= self._deadline
        return late or policy == "best_effort" or self.future.done()

    def read(self, store: Store) -> None:
        for key, buffer in zip(*self._runs, strict=True):
            if self.stopped or not store.get([key], [buffer]):
                return
            self.got += 1


class Transfers:
    """At most `most_bytes` wait to be written; what comes beyond is dropped and counted."""

    def __init__(self, store: Store, most_bytes: int) -> None:
        self.store, self.dropped, self._most_bytes = store, 0, most_bytes
        self._waiting: dict[Future[int], int] = {}  # with their bytes
        self._writer, self._reader = (ThreadPoolExecutor(1, f"bough-store-{name}") for name in ("writes", "reads"))

    def put(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> Future[int] | None:
        """The caller holds the buffers until this is done. None: dropped."""
        self._waiting = {future: size for future, size in self._waiting.items() if not future.done()}
        size = sum(buffer.nbytes for buffer in buffers)
        if sum(self._waiting.values()) + size > self._most_bytes:
            self.dropped += len(keys)
            return None
        future = self._writer.submit(self.store.put, keys, buffers)
        self._waiting[future] = size
        return future

    def fetch(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> Fetch:
        fetch = Fetch(keys, buffers)
        fetch.future = self._reader.submit(fetch.read, self.store)
        return fetch

    def close(self) -> None:
        for thread in (self._reader, self._writer):
            thread.shutdown()  # when it has done what waits
        self.store.close()
