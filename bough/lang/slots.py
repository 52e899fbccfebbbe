"""Where values wait until they exist: one slot for each variable, and the news that a text has grown.

Programs run in their own threads, values come on the event loop, and readers may be threads or coroutines; both wait on
the same `Future`s, which serve either.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from bough.lang.failure import Failure


class Slot:
    """One variable. It is filled once; until then `partial` shows what a stream has brought. A name that is used again
    gets a new slot."""

    __slots__ = ("failure", "filled", "meta", "partial", "value")

    def __init__(self) -> None:
        self.filled: Future[None] = Future()  # also when it is certain that the value will never come
        self.failure: Failure | None = None  # why not
        self.partial = ""
        self.value: Any = None
        self.meta: Any = None

    @classmethod
    def of(cls, value: Any) -> Slot:
        """A variable that has its value already."""
        slot = cls()
        slot.fill(value)
        return slot

    def fill(self, value: Any, meta: Any = None) -> None:
        self.value, self.meta = value, meta
        self.partial = value if isinstance(value, str) else str(value[0]) if isinstance(value, list) and value else ""
        if not self.filled.done():
            self.filled.set_result(None)

    def fail(self, failure: Failure) -> None:
        if not self.filled.done():
            self.failure = failure
            self.filled.set_result(None)

    def check(self) -> None:
        """When it is filled: raises if there is no value."""
        if self.failure is not None:
            raise self.failure.tell()


class News:
    """Tells any number of readers that something has changed since they last looked."""

    __slots__ = ("_lock", "_waiters", "version")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[Future[None]] = []
        self.version = 0

    def tell(self) -> None:
        with self._lock:
            self.version += 1
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # done: its reader has left
                waiter.set_result(None)

    def since(self, version: int) -> Future[None]:
        """Done when there is something newer than this version."""
        waiter: Future[None] = Future()
        with self._lock:
            if self.version == version:
                self._waiters.append(waiter)
                return waiter
        waiter.set_result(None)
        return waiter
