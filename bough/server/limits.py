"""What a request may not ask for, in any protocol: values out of the ranges of its schema, features that do not exist.

Ranges stand in the schemas, features in a table of each protocol. A feature that gets built loses its row there and is
read where prompts and parameters are made; nothing else has to change.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from bough.core.errors import RequestError
from bough.core.sampling_params import INT32_MAX, MAX_STOPS

# -1 turns it off; the engine refuses 0, which would leave no token to choose from.
TOP_K = msgspec.Meta(extra_json_schema={"minimum": -1, "maximum": INT32_MAX, "not": {"const": 0}})

# By field, the values that ask for nothing besides empty ones; with None among them even an empty one asks.
Harmless = Mapping[str, tuple[Any, ...]]


def between(low: float, high: float) -> msgspec.Meta:
    """The range of a number, for the OpenAPI page and for `check_ranges`, whose errors name both ends."""
    return msgspec.Meta(extra_json_schema={"minimum": low, "maximum": high})


def above(low: float, high: float) -> msgspec.Meta:
    """The same without the lower end."""
    return msgspec.Meta(extra_json_schema={"exclusiveMinimum": low, "maximum": high})


def check_ranges(request: msgspec.Struct) -> None:
    """Raises a `RequestError` that names the first field whose number is out of its range."""
    for name, (low, high, exclusive) in _ranges(type(request)).items():
        value = getattr(request, name)
        if value is None or (low <= value <= high and not (exclusive and value == low)):
            continue
        allowed = f"above {low} and at most {high}" if exclusive else f"between {low} and {high}"
        raise RequestError(f"{name} must be {allowed}, got {value}.", field=name)


def check_stops(stops: Any, name: str) -> None:
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise RequestError(f"{name} has {len(stops)} entries; at most {MAX_STOPS} are taken.", field=name)


def refuse_unbuilt(request: msgspec.Struct, unbuilt: Harmless) -> None:
    """Raises for the first field that asks for a feature which this engine does not have."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if name in unbuilt and value is not None and not _harmless(value, unbuilt[name]):
            raise RequestError(f"{name} is not supported by this server; leave it out.", field=name)


def asks_nothing(value: Any) -> bool:
    """Whether a field is empty; null and false ask for nothing also where they stand in a list or in an object."""
    if not value:
        return True
    left = [value]
    while left:
        match left.pop():
            case dict() as given:
                left += given.values()
            case list() as given:
                left += given
            case None | False:
                continue
            case _:
                return False
    return True


def _harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    return (asks_nothing(value) and None not in harmless) or value in harmless


@functools.cache
def _ranges(struct: type[msgspec.Struct]) -> dict[str, tuple[float, float, bool]]:
    """By field, the range that its annotation gives, and whether the lower end is outside of it."""
    ranges = {}
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            schema = note.extra_json_schema or {}
            if "maximum" in schema and "not" not in schema:  # a range with a hole is the engine's to check and explain
                exclusive = "exclusiveMinimum" in schema
                low = schema["exclusiveMinimum" if exclusive else "minimum"]
                ranges[name] = (low, schema["maximum"], exclusive)
    return ranges
