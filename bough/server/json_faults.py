"""What is wrong with a body, in words that help: the decoder tells less than it could about a few faults.

Looks at the body again, which only a faulty request costs.
"""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from bough.core.errors import RequestError

LONGEST_LOOK = 1 << 20  # bytes; a longer body is not worth the others' time


def unreadable(raw: bytes, error: Exception) -> RequestError:
    """For a body that is no JSON, or holds what no text or number can be."""
    return _odd_value(raw) or RequestError(f"The body is not valid JSON: {error}.")


def unacceptable(raw: bytes, complaint: str, struct: type[msgspec.Struct]) -> RequestError | None:
    """For a body that is JSON, but not the struct's; None where the decoder's own words are good."""
    choice = re.fullmatch(r"Invalid enum value (.*) - at `\$\.(.*)`", complaint)
    if choice is not None:
        given, path = choice.groups()
        allowed = ", ".join(map(repr, _choices(struct, re.sub(r"\[.*?\]", "", path).split("."))))
        return RequestError(f"{path} must be one of {allowed}; got {given}.", field=path.split("[")[0])
    return _odd_value(raw) if complaint.startswith("Number out of range") else None


def _odd_value(raw: bytes) -> RequestError | None:
    """The first value of which JSON can write what Python's text and floats cannot hold."""
    if len(raw) > LONGEST_LOOK:
        return None
    try:
        body = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    for path, value in _leaves(body, ""):
        field = path.rpartition(".")[2].split("[")[0] or None
        if isinstance(value, float) and not math.isfinite(value):
            return RequestError(f"{path} is a number that is too large to be represented.", field=field)
        if isinstance(value, str) and re.search(r"[\ud800-\udfff]", value):
            return RequestError(f"{path or 'The body'} holds a lone surrogate, which is no text.", field=field)
    return None


def _refuse(literal: str) -> None:
    raise ValueError(f"{literal} is no JSON")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield path, name
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{i}]")
    else:
        yield path, value


def _choices(hint: Any, path: list[str]) -> list[Any]:
    """The values that the type allows where the path leads."""
    found: list[Any] = []
    for kind in (hint, *_parts(hint)):
        if typing.get_origin(kind) is typing.Literal and not path:
            found += typing.get_args(kind)
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and path:
            hints = typing.get_type_hints(kind)
            found += _choices(hints[path[0]], path[1:]) if path[0] in hints else []
    return found


def _parts(hint: Any) -> Iterator[Any]:
    """The types that a type is made of: the members of a union, the elements of a list."""
    if typing.get_origin(hint) is not typing.Literal:
        for part in typing.get_args(hint):
            yield part
            yield from _parts(part)
