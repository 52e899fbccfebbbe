"""Whether a document is a JSON schema at all: each keyword with a value of the shape that it asks for.

What the meta-schema says, as a table: a validator over the meta-schema takes milliseconds for each subschema, and a
client may send ten thousand. Forms of earlier drafts that are read as they meant (tuples in `items`, true as an
exclusive bound) pass. Keywords that nobody knows are no mistake either, but may be misspelt ones: they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bough.constrained.schema_source import join

Problem = tuple[str, str]  # where, and what is wrong there
TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def problems(node: Any, pointer: str = "") -> Iterator[Problem]:
    """What is wrong with a schema and those in it, one after the other."""
    if isinstance(node, bool):
        return
    if not isinstance(node, dict):
        yield pointer, f"{_shown(node)} is not a schema (an object, true or false)"
        return
    for keyword, value in node.items():
        path = join(pointer, keyword)
        if keyword in SHAPES:
            holds, wanted = SHAPES[keyword]
            if not holds(value):
                yield path, f"{_shown(value)} is not {wanted}"
        elif keyword in SCHEMAS or (keyword == "items" and not isinstance(value, list)):
            yield from problems(value, path)
        elif keyword in LISTS or keyword == "items":
            yield from _in_list(value, path)
        elif keyword in MAPS:
            yield from _in_map(value, path)


def unknown(node: Any, pointer: str = "") -> list[str]:
    """Where keywords stand that JSON Schema does not know, each of them once."""
    found: dict[str, str] = {}
    for path, keyword in _keywords(node, pointer):
        if keyword not in KNOWN and not keyword.startswith(EXTENSION):
            found.setdefault(keyword, path)
    return list(found.values())


def _keywords(node: Any, pointer: str) -> Iterator[tuple[str, str]]:
    """Every keyword of a valid schema and those in it, with its place."""
    if not isinstance(node, dict):
        return
    for keyword, value in node.items():
        path = join(pointer, keyword)
        yield path, keyword
        if keyword in SCHEMAS or (keyword == "items" and isinstance(value, dict)):
            inner = [(path, value)]
        elif keyword in LISTS or keyword in MAPS or keyword == "items":
            steps = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
            inner = [(join(path, step), part) for step, part in steps]
        else:
            continue
        for place, part in inner:
            yield from _keywords(part, place)


def _in_list(value: Any, path: str) -> Iterator[Problem]:
    if not isinstance(value, list) or (not value and not path.endswith("/items")):
        yield path, f"{_shown(value)} is not a list of schemas" if value else "[] should be non-empty"
        return
    for index, part in enumerate(value):
        yield from problems(part, join(path, index))


def _in_map(value: Any, path: str) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield path, f"{_shown(value)} is not an object of schemas"
        return
    for name, part in value.items():
        if not (path.endswith("/dependencies") and _is_strings(part)):
            yield from problems(part, join(path, name))


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == value // 1


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _is_type(value: Any) -> bool:
    named = [value] if isinstance(value, str) else value
    return _is_strings(named) and bool(named) and set(named) <= TYPES and len(set(named)) == len(named)


def _is_lists_of_names(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_strings, value.values()))


Shape = tuple[Callable[[Any], bool], str]
TEXT: Shape = (lambda value: isinstance(value, str), "a string")
FLAG: Shape = (lambda value: isinstance(value, bool), "true or false")
NUMBER: Shape = (_is_number, "a number")
COUNT: Shape = (_is_count, "a whole number from 0 on")
LIST: Shape = (lambda value: isinstance(value, list), "a list")
SHAPES: dict[str, Shape] = {
    "type": (_is_type, "a type, or a list of different ones"),
    "required": (lambda value: isinstance(value, bool) or _is_strings(value), "a list of names"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "exclusiveMinimum": (lambda value: isinstance(value, int | float), "a number"),
    "exclusiveMaximum": (lambda value: isinstance(value, int | float), "a number"),
    "dependentRequired": (_is_lists_of_names, "an object of lists of names"),
    **dict.fromkeys(("minimum", "maximum"), NUMBER),
    **dict.fromkeys(("enum", "examples"), LIST),
    **dict.fromkeys(("uniqueItems", "deprecated", "readOnly", "writeOnly"), FLAG),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"), COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), COUNT),
    **dict.fromkeys(("pattern", "format", "title", "description", "$id", "$ref", "$anchor", "$comment"), TEXT),
    **dict.fromkeys(("$schema", "$dynamicRef", "$dynamicAnchor"), TEXT),
}
SCHEMAS = frozenset({
    "additionalItems", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties", "contentSchema",
})  # fmt: skip
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
EXTENSION = "x-"  # by agreement a remark to somebody else
UNSHAPED = frozenset({  # known, and of any shape
    "items", "const", "default", "example", "contentEncoding", "contentMediaType", "id", "$vocabulary", "$recursiveRef",
    "$recursiveAnchor", "divisibleBy", "disallow", "extends",
})  # fmt: skip
KNOWN = SHAPES.keys() | SCHEMAS | LISTS | MAPS | UNSHAPED
