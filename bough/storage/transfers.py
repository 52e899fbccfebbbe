"""Runs on their way between buffers and a store, off the scheduler's thread: one thread writes, another reads."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from bough.storage.store import Buffer, Store

FETCH_S, FETCH_RUN_S = 1.0, 0.0625  # that the policy `timeout` waits, and for each run


class Fetch:
    """Runs of `run_bytes` that are read one after the other."""

    def __init__(self, keys: Sequence[str], run_bytes: int) -> None:
        self.keys, self._run_bytes = keys, run_bytes
        self.runs: list[Buffer] = []  # the first ones, as far as they were found
        self.seconds = 0.0  # that reading them took
        self.stopped = False  # then no further one is begun
        self.future: Future[None] = Future()
        self._deadline = time.monotonic() + FETCH_S + FETCH_RUN_S * len(keys)

    def settled(self, policy: str) -> bool:
        """Whether its request waits no longer, by `--hicache-storage-prefetch-policy`."""
        late = policy == "timeout" and time.monotonic() >= self._deadline
        return late or policy == "best_effort" or self.future.done()

    def read(self, store: Store) -> None:
        for key in self.keys:
            run, began = np.empty(self._run_bytes, dtype=np.uint8), time.monotonic()
            if self.stopped or not store.get([key], [run]):
                return
            self.seconds += time.monotonic() - began
            self.runs.append(run)


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

    def remove(self, keys: Sequence[str]) -> None:
        """When what waits has been written."""
        self._writer.submit(self.store.remove, keys)

    def fetch(self, keys: Sequence[str], run_bytes: int) -> Fetch:
        fetch = Fetch(keys, run_bytes)
        fetch.future = self._reader.submit(fetch.read, self.store)
        return fetch

    def close(self) -> None:
        for thread in (self._reader, self._writer):
            thread.shutdown()  # when it has done what waits
        self.store.close()
