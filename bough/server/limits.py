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
from bough.core.sampling_params import MAX_STOPS

# By field, the values that ask for nothing besides empty ones; with None among them even an empty one asks.
Harmless = Mapping[str, tuple[Any, ...]]


def between(low: float, high: float) -> msgspec.Meta:
    """The range of a number, for the OpenAPI page and for `check_ranges`, whose errors name both ends."""
    return msgspec.Meta(extra_json_schema={"minimum": low, "maximum": high})


def check_ranges(request: msgspec.Struct) -> None:
    """Raises a `RequestError` that names the first field whose number is out of its range."""
    for name, (low, high) in _ranges(type(request)).items():
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise RequestError(f"{name} must be between {low} and {high}, got {value}.", field=name)


def check_stops(stops: Any, name: str) -> None:
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise RequestError(f"{name} has {len(stops)} entries; at most {MAX_STOPS} are taken.", field=name)


def refuse_unbuilt(request: msgspec.Struct, unbuilt: Harmless) -> None:
    """Raises for the first field that asks for a feature which this engine does not have."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if name in unbuilt and value is not None and not _harmless(value, unbuilt[name]):
            raise RequestError(f"{name} is not supported by this server; leave it out.", field=name)


def _harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    return (not value and None not in harmless) or value in harmless


@functools.cache
def _ranges(struct: type[msgspec.Struct]) -> dict[str, tuple[float, float]]:
    """By field, the range that its annotation gives."""
    ranges = {}
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            schema = note.extra_json_schema or {}
            if "minimum" in schema:
                ranges[name] = (schema["minimum"], schema["maximum"])
    return ranges
