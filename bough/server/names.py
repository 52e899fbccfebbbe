"""Errors in the client's own words: those from deeper down speak of the engine's names for fields, and a client should
read of the field that it sent."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from starlette.requests import Request
from starlette.types import Scope

from bough.core.errors import RequestError

Names = Mapping[str, str]  # the engine's name to the protocol's
NAMES_KEY = "bough.names"  # where a handler leaves the names of its request


def name_fields(request: Request, names: Names) -> None:
    """From here on, the errors of this request are told in these names, those of the engine and of a stream too."""
    request.scope[NAMES_KEY] = names


def in_words_of(scope: Scope, error: Exception) -> Exception:
    """The error as the client of this request should read it."""
    names: Names = scope.get(NAMES_KEY, {})
    return renamed(error, names) if names and isinstance(error, RequestError) else error


@contextlib.contextmanager
def in_names_of(names: Names) -> Iterator[None]:
    """Renames fields in the errors that are raised inside."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, names) from None


def renamed(error: RequestError, names: Names) -> RequestError:
    """A name that is also a plain word is meant as a name only where it begins the sentence: `prompt must be`, but `a
    prompt position`."""
    anywhere = "|".join(rf"\b{name}\b" if "_" in name else rf"\A{name}\b" for name in names)
    return RequestError(
        re.sub(anywhere, lambda found: names[found[0]], error.message),
        field=names.get(error.field or "", error.field),
        status_code=error.status_code,
        err_type=error.err_type,
    )
