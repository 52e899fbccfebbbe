"""Errors in the client's own words: those from deeper down speak of the engine's names for fields, and a client should
read of the field that it sent."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from bough.core.errors import RequestError


@contextlib.contextmanager
def in_names_of(names: Mapping[str, str]) -> Iterator[None]:
    """Renames fields in the errors that are raised inside: the engine's name to the protocol's."""
    try:
        yield
    except RequestError as error:
        pattern = rf"\b({'|'.join(names)})\b"
        raise RequestError(
            re.sub(pattern, lambda found: names[found[0]], error.message),
            field=names.get(error.field or "", error.field),
            status_code=error.status_code,
            err_type=error.err_type,
        ) from None
