"""Arguments that stand one by one in a call, as a format of a structural tag: what `NamedArguments` reads back.

A parameter that is a string and nothing more is any text, up to the marker that ends it; one that is no string is JSON.
What a schema says beyond that (strings with a pattern, names that are not declared, ...) cannot be said in this way,
and then there is no such format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bough.parsers.formats.base import Shape
from bough.parsers.values import kinds_of, refers

Schema = Mapping[str, Any]
ABOUT = frozenset({"title", "description", "default", "examples", "$comment"})  # what only informs
OF_ARGUMENTS = ABOUT | {"type", "properties", "required", "additionalProperties", "$schema", "$id"}
NAME = re.compile(r"[\w.\-]{1,100}")  # so that a name cannot be taken for a marker of some format
NOTHING = {"type": "regex", "pattern": "\\n?"}


def named_content(shape: Shape, schema: Schema) -> dict[str, Any] | None:
    """The arguments of one call, in the order of the schema; None where the schema says more than can be said so."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not OF_ARGUMENTS.issuperset(schema) or not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    if schema.get("type", "object") != "object" or not all(isinstance(name, str) for name in required):
        return None
    if not set(required) <= set(properties):
        return None
    elements: list[dict[str, Any]] = []
    for name, inner in properties.items():
        value = _value(inner)
        if value is None or not NAME.fullmatch(name):
            return None
        tag = _tag(shape, name, value)
        elements.append(tag if name in required else {"type": "optional", "content": tag})
    return {"type": "sequence", "elements": elements} if elements else NOTHING


def schema_places(schema: Schema) -> Iterator[tuple[str, str]]:
    """Where schemas stand in that format: the way to each, and the way to it in the arguments' own schema."""
    required = schema.get("required", [])
    for i, (name, inner) in enumerate(schema.get("properties", {}).items()):
        value = _value(inner)
        if value is not None and value["type"] == "json_schema":
            inside = "" if name in required else "/content"
            yield f"/elements/{i}{inside}/content/json_schema", f"/properties/{_step(name)}"


def _tag(shape: Shape, name: str, value: dict[str, Any]) -> dict[str, Any]:
    assert shape.argument is not None
    is_text = value["type"] != "json_schema"
    return {"type": "tag", "begin": shape.argument(name, is_text), "content": value, "end": shape.argument_end}


def _value(schema: Any) -> dict[str, Any] | None:
    """The format of one value; None where it could be taken for another."""
    kinds = kinds_of(schema)
    if kinds is None or refers(schema):
        return None
    if "string" not in kinds:
        return {"type": "json_schema", "json_schema": schema}
    if kinds != {"string"}:
        return None
    said = set(schema) - ABOUT - {"type"}
    if not said:
        return {"type": "any_text"}
    choices = schema.get("enum")
    if (
        said == {"enum"}
        and isinstance(choices, list)
        and all(isinstance(choice, str) and choice.strip() == choice != "" for choice in choices)
    ):
        return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in choices]}
    return None


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
