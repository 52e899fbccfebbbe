"""Why a program failed, and the error that tells it: the program, the line, what was written so far, the reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from bough.core.errors import ProgramError

PACKAGE = str(Path(__file__).parent)
SHOWN_CHARACTERS = 400  # of the text so far: its end, where the failure is


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a program."""

    file: str
    line: int
    function: str  # programs may call programs

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


@dataclass(slots=True)
class Failure:
    """What went wrong. Errors are made anew for each who asks: one exception cannot be raised in several threads."""

    program: str
    site: Site | None
    text: str
    cause: BaseException
    told: bool = False  # somebody knows: who caught it has dealt with it

    def tell(self) -> ProgramError:
        """The error for one who asks."""
        self.told = True
        return self.to_error()

    def to_error(self) -> ProgramError:
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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return None if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def raising_site(error: BaseException, file: str) -> Site | None:
    """The innermost line of the given file on an error's way."""
    trace: TracebackType | None = error.__traceback__
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            found = Site(file, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return found


def running_site(thread: int, file: str) -> Site | None:
    """The innermost line of the given file at which a thread is."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return None if frame is None else Site(file, frame.f_lineno, frame.f_code.co_name)
