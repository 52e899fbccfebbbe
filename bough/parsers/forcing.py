"""Grammars for calls that must come (`tool_choice` `required`, or a tool by name), as fields of sampling parameters.

Where a format writes arguments as JSON, the grammar is that format with each tool's own schema in the place of the
arguments. Other formats have no grammar that every back end knows, so the model is made to write a JSON list of calls,
which `JsonList` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bough.parsers.formats.base import Shape, ToolFormat
from bough.parsers.formats.json_list import JsonList

Schema = Mapping[str, Any]
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}}


def forced_format(tool_format: ToolFormat | None) -> ToolFormat:
    """The format of an answer that `forced_calls` governs."""
    return tool_format if tool_format is not None and tool_format.shape is not None else JsonList()


def forced_openings(tool_format: ToolFormat | None, names: Iterable[str]) -> tuple[str, ...]:
    """What such an answer may begin with."""
    shape = forced_format(tool_format).shape
    if shape is None:
        return ("[",)
    return (shape.before,) if shape.before else tuple(shape.begin(name) for name in names)


def forced_calls(tool_format: ToolFormat | None, tools: Mapping[str, Schema], *, single: bool) -> dict[str, Any]:
    """The sampling field that makes an answer nothing but calls of these tools: one if `single`, else one or more."""
    shape = forced_format(tool_format).shape
    if shape is None:
        return {"json_schema": _call_list(tools, single=single)}
    return {"structural_tag": {"type": "structural_tag", "format": _tags(shape, tools, single=single)}}


def _tags(shape: Shape, tools: Mapping[str, Schema], *, single: bool) -> dict[str, Any]:
    tags = {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": shape.begin(name),
                "content": {"type": "json_schema", "json_schema": schema or NO_ARGUMENTS},
                "end": shape.end,
            }
            for name, schema in tools.items()
        ],
        "separator": shape.between,
        "at_least_one": True,
        "stop_after_first": single,
    }
    around = [{"type": "const_string", "value": text} if text else None for text in (shape.before, shape.after)]
    elements = [element for element in (around[0], tags, around[1]) if element is not None]
    return tags if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _call_list(tools: Mapping[str, Schema], *, single: bool) -> dict[str, Any]:
    """A list of calls. A schema that refers to its own parts moves to the definitions, and its references with it."""
    definitions: dict[str, Any] = {}
    choices = []
    for name, schema in tools.items():
        parameters: Any = schema or NO_ARGUMENTS
        if _refers(parameters):
            definitions[name] = _moved(parameters, name)
            parameters = {"$ref": _pointer(name)}
        choices.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items: Any = choices[0] if len(choices) == 1 else {"anyOf": choices}
    listed: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if single:
        listed["maxItems"] = 1
    return listed | ({"$defs": definitions} if definitions else {})


def _refers(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def _moved(schema: Any, name: str) -> Any:
    if isinstance(schema, list):
        return [_moved(each, name) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: _pointer(name) + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, name)
        for key, value in schema.items()
    }


def _pointer(name: str) -> str:
    return f"#/$defs/{name}"
