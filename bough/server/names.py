"""Errors and warnings in the client's own words: those from deeper down speak of the engine's names for fields, and a
client should read of the field that it sent.

A name may also be a place inside a field, such as `structural_tag#/format/tags/0/content/json_schema`, where the server
wrote something of the client's (a tool's parameters) into a grammar of its own.
"""

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
    """Renames fields in the errors that are raised inside, and in what the engine has to say of this request later."""
    _spoken.set(names)
    try:
        yield
    except RequestError as error:
        raise _renamed(error, _spoken.get() or {}) from None


def speak_plainly() -> None:
    """A request begins, whose names are not known yet."""
    _spoken.set(None)


def speak_also(names: Names) -> None:
    """More names of the request in progress; they win over those that are known already."""
    _spoken.set({**(_spoken.get() or {}), **names})


def client_name(name: str) -> str:
    """What the client of the request in progress calls one of the engine's fields."""
    return (_spoken.get() or {}).get(name, name)


def in_spoken_names(error: Exception) -> Exception:
    """The error in the names of the request in progress; one that is in them already stays as it is."""
    names = _spoken.get()
    return _renamed(error, names) if names and isinstance(error, RequestError) else error


def in_spoken_words(text: str) -> str:
    """A sentence of the engine's, such as a warning, in the names of the request in progress."""
    names = _spoken.get()
    return _Sentence(text, names).text if names else text


def _renamed(error: RequestError, names: Names) -> RequestError:
    if not names:
        return error
    said = _Sentence(error.message, names)
    return RequestError(
        said.text,
        field=said.place or names.get(error.field or "", error.field),
        status_code=error.status_code,
        err_type=error.err_type,
    )


class _Sentence:
    """A sentence with its names replaced; `place` is the client's word for the first place in it."""

    def __init__(self, text: str, names: Names) -> None:
        self._names = names
        self.place: str | None = None
        longest_first = sorted(names, key=len, reverse=True)
        self.text = re.sub("|".join(map(_pattern, longest_first)), self._replace, text)

    def _replace(self, found: re.Match[str]) -> str:
        inside = found[0].endswith("#")  # a path goes on from here
        theirs = self._names[found[0].removesuffix("#")]
        if "#" in found[0].removesuffix("#"):
            self.place = self.place or theirs.partition("#")[0]
            inside = inside or found.string.startswith("/", found.end())
        return f"{theirs}#" if inside and "#" not in theirs else theirs


def _pattern(name: str) -> str:
    """A name that is also a plain word is meant as a name only where it begins the sentence, or has a path behind it:
    `prompt must be`, but `a prompt position`."""
    if "#" in name:
        return rf"\b{re.escape(name)}\b(?:#(?=/))?"
    if "_" in name:
        return rf"(?<![\w.]){name}\b"  # not inside a name that was put there: `options.top_p`
    return rf"\A{name}\b|\b{name}\b(?=#)"
