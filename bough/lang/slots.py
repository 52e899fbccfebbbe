"""Where values wait until they exist: a slot for each variable, the news that a text has grown, and failures.

Threads and coroutines wait on the same `Future`s.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

from bough.core.errors import ProgramError

PACKAGE = str(Path(__file__).parent)
SHOWN_CHARACTERS = 400  # of the text so far: its end, where the failure is


@dataclass(frozen=True, slots=True)
class Site:
    file: str
    line: int
    function: str  # programs may call programs

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


@dataclass(slots=True)
class Failure:
    """The failure, as a fresh exception for each caller: one exception cannot be raised in several threads."""

    program: str
    site: Site | None
    text: str
    cause: BaseException
    reported: bool = False  # a caller has received it

    def report(self) -> ProgramError:
        self.reported = True
        if isinstance(self.cause, ProgramError):  # of a branch, or of a program inside this one: it says all
            inner = self.cause
            error = ProgramError(str(inner), program=inner.program, line=inner.line, text=inner.text)
            error.__cause__ = inner.__cause__
            return error
        where = "" if self.site is None else f" at {self.site}"
        shown = self.text if len(self.text) <= SHOWN_CHARACTERS else f"…{self.text[-SHOWN_CHARACTERS:]}"
        reason = f"{type(self.cause).__name__}: {self.cause}"
        error = ProgramError(
            f"Program {self.program!r} failed{where}: {reason}\nText so far: {shown!r}",
            program=self.program,
            line="" if self.site is None else str(self.site),
            text=self.text,
        )
        error.__cause__ = self.cause
        return error


def calling_site() -> Site | None:
    """The line outside this package that called into it."""
    return _first(walk_stack(sys._getframe(1)), lambda file: not file.startswith(PACKAGE))


def raising_site(error: BaseException, file: str) -> Site | None:
    """The innermost line of the given file on an error's way."""
    return _first(reversed([*walk_tb(error.__traceback__)]), file.__eq__)


def running_site(thread: int, file: str) -> Site | None:
    """The innermost line of the given file at which a thread is."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else _first(walk_stack(frame), file.__eq__)


def _first(frames: Iterable[tuple[FrameType, int]], wanted: Callable[[str], bool]) -> Site | None:
    sites = (Site(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames)
    return next((site for site in sites if wanted(site.file)), None)


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
        if self.failure is not None:
            raise self.failure.report()


class Changes:
    """Tells any number of readers that something has changed since they last looked."""

    __slots__ = ("_lock", "_waiters", "version")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[Future[None]] = []
        self.version = 0

    def notify(self) -> None:
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
