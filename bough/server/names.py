"""Errors in the client's own words: those from deeper down speak of the engine's names for fields, and a client should
read of the field that it sent."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from bough.core.errors import RequestError


@contextlib.contextmanager
def in_names_of(names: Mapping[str, str]) -> Iterator[None]:
    """Renames fields in the errors that are raised inside: the engine's name to the protocol's. A name that is also a
    plain word is meant as a name only where it begins the sentence: `prompt must be`, but `a prompt position`."""
    try:
        yield
    except RequestError as error:
        anywhere = "|".join(rf"\b{name}\b" if "_" in name else rf"\A{name}\b" for name in names)
        raise RequestError(
            re.sub(anywhere, lambda found: names[found[0]], error.message),
            field=names.get(error.field or "", error.field),
            status_code=error.status_code,
            err_type=error.err_type,
        ) from None
