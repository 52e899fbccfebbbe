"""Whether plain schemas exclude each other: `oneOf` is `anyOf` where they do.

Schemas are known to exclude each other when their types differ, when their values do, or when all ask for a property on
which they exclude each other, which is how people write tagged unions. Anything else counts as not known. All are
looked at together: comparing each with each would take hours for the thousands that a client may send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import Any

from bough.constrained.schema_judge import same

MAX_STEPS = 8
MAX_COMPARED = 48  # objects that are compared each with each, where no property tells all of them apart
MAX_LEAVES = 20_000
Owned = tuple[int, dict[str, Any]]  # a schema, and the option that it belongs to


def are_disjoint(options: Sequence[dict[str, Any]], definitions: Mapping[str, dict[str, Any]]) -> bool:
    return _told_apart(list(enumerate(options)), definitions, MAX_STEPS)


def _told_apart(schemas: list[Owned], definitions: Mapping[str, dict[str, Any]], steps: int) -> bool:
    if steps == 0:
        return False
    owner_of_value: dict[Any, int] = {}
    owners_of_kind: dict[str, set[int]] = {}  # of schemas that give a type
    value_kinds: dict[str, set[int]] = {}  # of schemas that give values
    objects: list[Owned] = []
    leaves = list(islice(_leaves(schemas, definitions, steps), MAX_LEAVES))
    if len(leaves) == MAX_LEAVES:
        return False
    for owner, schema in leaves:
        if "enum" in schema:
            for value in schema["enum"]:
                if owner_of_value.setdefault(same(value), owner) != owner:
                    return False
                value_kinds.setdefault(_kind(value), set()).add(owner)
        elif "type" not in schema:
            return len({one for one, _ in schemas}) == 1
        else:
            kind = "number" if schema["type"] == "integer" else schema["type"]
            owners_of_kind.setdefault(kind, set()).add(owner)
            if kind == "object":
                objects.append((owner, schema))
    for kind, owners in owners_of_kind.items():
        everyone = owners | value_kinds.get(kind, set())
        if len(everyone) > 1 and (kind != "object" or value_kinds.get(kind)):
            return False
    return _objects_apart(objects, definitions, steps)


def _leaves(schemas: Sequence[Owned], definitions: Mapping[str, dict[str, Any]], steps: int) -> Iterator[Owned]:
    """The schemas with references and alternatives followed, each to a small depth."""
    for owner, schema in schemas:
        if "$ref" in schema:
            target = definitions.get(schema["$ref"].rpartition("/")[2])
            inner = [(owner, {} if target is None or steps == 0 else target)]
            yield from _leaves(inner, definitions, steps - 1) if inner[0][1] else inner
        elif "anyOf" in schema:
            options = [(owner, option) for option in schema["anyOf"]]
            yield from _leaves(options, definitions, steps - 1) if steps else [(owner, {})]
        else:
            yield owner, schema


def _objects_apart(objects: list[Owned], definitions: Mapping[str, dict[str, Any]], steps: int) -> bool:
    """Whether objects of different owners exclude each other: by one property for all, or each by one with each."""
    if len({owner for owner, _ in objects}) < 2:
        return True
    shared = set.intersection(*({*schema.get("required", ())} for _, schema in objects))
    for name in sorted(shared):
        values = [(owner, schema["properties"][name]) for owner, schema in objects if name in schema["properties"]]
        if len(values) == len(objects) and _told_apart(values, definitions, steps - 1):
            return True
    if len(objects) == 2 or len(objects) > MAX_COMPARED:
        return False
    pairs = ([one, other] for one, other in combinations(objects, 2) if one[0] != other[0])
    return all(_objects_apart(pair, definitions, steps - 1) for pair in pairs)


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
