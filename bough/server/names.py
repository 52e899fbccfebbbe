"""Errors in the client's own words: those from deeper down speak of the engine's names for fields, and a client should
read of the field that it sent."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

from bough.core.errors import RequestError

Names = Mapping[str, str]  # the engine's name to the protocol's
_spoken: ContextVar[Names | None] = ContextVar("names of the fields of the request in progress", default=None)


@contextlib.contextmanager
def in_names_of(names: Names) -> Iterator[None]:
    """Renames fields in the errors that are raised inside, and in those that the engine has for this request later."""
    _spoken.set(names)
    try:
        yield
    except RequestError as error:
        raise _renamed(error, names) from None


def speak_plainly() -> None:
    """A request begins, whose names are not known yet."""
    _spoken.set(None)


def in_spoken_names(error: Exception) -> Exception:
    """The error in the names of the request in progress; one that is in them already stays as it is."""
    names = _spoken.get()
    return _renamed(error, names) if names and isinstance(error, RequestError) else error


def _renamed(error: RequestError, names: Names) -> RequestError:
    """A name that is also a plain word is meant as a name only where it begins the sentence: `prompt must be`, but `a
    prompt position`."""
    if not names:
        return error
    places = "|".join(rf"\b{name}\b" if "_" in name else rf"\A{name}\b" for name in names)
    return RequestError(
        re.sub(places, lambda found: names[found[0]], error.message),
        field=names.get(error.field or "", error.field),
        status_code=error.status_code,
        err_type=error.err_type,
    )
