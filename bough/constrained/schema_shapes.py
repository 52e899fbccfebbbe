"""Whether a document is a JSON schema at all: each keyword with a value of the shape that it asks for.

A table, because a validator over the meta-schema takes milliseconds for each subschema. Forms of earlier drafts pass.
Unknown keywords may be misspelt ones: they are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bough.constrained.schema_source import join

Problem = tuple[str, str]  # where, and what is wrong there
TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def problems(schema: Any) -> Iterator[Problem]:
    """What is wrong with a schema and those in it, one after the other."""
    for pointer, node in _subschemas(schema, ""):
        if not isinstance(node, dict | bool):
            yield pointer, f"{_shown(node)} is not a schema (an object, true or false)"
        for keyword, value in node.items() if isinstance(node, dict) else ():
            path = join(pointer, keyword)
            if keyword in SHAPES:
                holds, wanted = SHAPES[keyword]
                if not holds(value):
                    yield path, f"{_shown(value)} is not {wanted}"
            elif keyword in LISTS and value == []:
                yield path, "[] should be non-empty"
            elif keyword in LISTS and not isinstance(value, list):
                yield path, f"{_shown(value)} is not a list of schemas"
            elif keyword in MAPS and not isinstance(value, dict):
                yield path, f"{_shown(value)} is not an object of schemas"


def unknown(schema: Any) -> list[str]:
    """Where keywords stand that JSON Schema does not know, each of them once."""
    found: dict[str, str] = {}
    for pointer, node in _subschemas(schema, ""):
        for keyword in node if isinstance(node, dict) else ():
            if keyword not in KNOWN and not keyword.startswith(EXTENSION):
                found.setdefault(keyword, join(pointer, keyword))
    return list(found.values())


def _subschemas(node: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """A schema and all in it, with their places."""
    yield pointer, node
    for keyword, value in node.items() if isinstance(node, dict) else ():
        for place, part in _schemas_in(keyword, value, join(pointer, keyword)):
            yield from _subschemas(part, place)


def _schemas_in(keyword: str, value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, list) and (keyword in LISTS or keyword == "items"):
        return [(join(path, index), part) for index, part in enumerate(value)]
    if isinstance(value, dict) and keyword in MAPS:
        named = [(name, part) for name, part in value.items() if keyword != "dependencies" or not _is_strings(part)]
        return [(join(path, name), part) for name, part in named]
    return [(path, value)] if keyword in SCHEMAS or keyword == "items" else []


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
