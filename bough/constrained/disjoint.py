"""Whether plain schemas exclude each other: `oneOf` is `anyOf` where they do.

Two schemas are known to exclude each other when their types differ, when their values do, or when both ask for a
property on which they exclude each other, which is how people write tagged unions. Anything else counts as not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

MAX_STEPS = 8


def are_disjoint(options: Sequence[dict[str, Any]], definitions: Mapping[str, dict[str, Any]]) -> bool:
    """Whether no value satisfies two of the options."""
    return all(_exclude(one, other, definitions, MAX_STEPS) for one, other in combinations(options, 2))


def _exclude(one: dict[str, Any], other: dict[str, Any], definitions: Mapping[str, dict[str, Any]], steps: int) -> bool:
    if steps == 0:
        return False
    for this, that in ((one, other), (other, one)):
        if "$ref" in this:
            target = definitions.get(this["$ref"].rpartition("/")[2])
            return target is not None and _exclude(target, that, definitions, steps - 1)
        if "anyOf" in this:
            return all(_exclude(option, that, definitions, steps - 1) for option in this["anyOf"])
    if "enum" in one and "enum" in other:
        return not any(_same(a, b) for a in one["enum"] for b in other["enum"])
    types = [{_kind(value) for value in s["enum"]} if "enum" in s else {_wide(s.get("type"))} for s in (one, other)]
    if None not in types[0] | types[1] and not types[0] & types[1]:
        return True
    shared = {*one.get("required", ())} & {*other.get("required", ())}
    return any(
        _exclude(one["properties"][name], other["properties"][name], definitions, steps - 1)
        for name in shared
        if name in one.get("properties", {}) and name in other.get("properties", {})
    )


def _wide(name: str | None) -> str | None:
    return "number" if name == "integer" else name


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _same(one: Any, other: Any) -> bool:
    return _kind(one) == _kind(other) and one == other
