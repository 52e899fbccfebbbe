"""Every error that a user may meet, by whom it concerns.

`RequestError` concerns one request; the others end the engine or the command with one clear sentence. Anything that is
not a `BoughError` is a defect.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class BoughError(Exception):
    """An error whose text is written for the user: it says what is wrong and what to do."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is spelt most like this one, case aside, for a sentence that asks whether it was meant."""
    by_folded = {name.casefold(): name for name in known}
    if len(word) > 2 * max(map(len, by_folded), default=0):  # like none of them, and long to compare
        return None
    return next((by_folded[near] for near in difflib.get_close_matches(word.casefold(), by_folded, n=1)), None)


class SettingsError(BoughError):
    """A flag, keyword or configuration file that cannot be used."""


class ModelError(BoughError):
    """A model that cannot be found, fetched, read or run."""


# What reading a file raises whose values are of another kind than they should be.
UNNAMED = ("Exception", "PanicException", "error", "PatternError")  # what libraries raise, `struct.error` too
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def damage_named(where: object) -> Iterator[None]:
    """Around the reading of a model's files: values that no check has foreseen are the files' fault."""
    try:
        yield
    except BoughError:
        raise
    except BaseException as error:
        # The tokenizers library raises a bare `Exception`, or panics, which is none and has no class to import.
        if not isinstance(error, DAMAGE) and type(error).__name__ not in UNNAMED:
            raise
        wrong = f"{type(error).__name__}: {error}"
        raise ModelError(f"{where} has a value that cannot be used ({wrong}); fetch it again.") from error


class ResourceError(BoughError):
    """Not enough memory, disk or address space; the text names the setting to change."""


class EngineDeadError(BoughError):
    """The engine's processes have ended; no request can be answered any more."""


class RankLostError(EngineDeadError):
    """A rank that could not meet the others: one of them has died or is stuck, which is the reason proper."""


class RequestError(BoughError, ValueError):
    """One request that cannot be served as it stands. `field` is the input that must change, where one is to blame;
    `code` is OpenAI's word for what is wrong, where clients look for that."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        status_code: int = 400,
        err_type: str = "BadRequestError",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status_code = status_code
        self.err_type = err_type
        self.code = code


class ProgramError(BoughError):
    """A program of the frontend language that failed: which one, where, and what it had written. The reason is its
    `__cause__`; `state` is the program's state, where there is one to look at."""

    def __init__(self, message: str, *, program: str, line: str, text: str) -> None:
        super().__init__(message)
        self.program = program
        self.line = line
        self.text = text
        self.state: object | None = None
