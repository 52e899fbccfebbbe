"""Grammars of calls, as sampling parameters: for calls that must come, and for calls of `strict` tools once one begins.

Where a format writes arguments as JSON, the grammar is that format with each tool's schema in the place of the
arguments. In other formats a call that must come is an element of a JSON list, which `JsonList` reads; those that write
arguments one by one can be watched, if the schemas allow it (`named_content`).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bough.parsers.formats.base import Shape, ToolFormat
from bough.parsers.formats.json_calls import JsonList
from bough.parsers.values import kinds_of, refers

Schema = Mapping[str, Any]
ANY_ARGUMENTS: Schema = {"type": "object"}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
# What a schema may say besides `properties` without a word on which names there may be.
WITHOUT_NAMES = frozenset({"type", "properties", "required", "title", "description", "$schema", "$id", "$comment"})


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """`fields` are sampling parameters; `places` tell where in them the tools' schemas stand: by the engine's way to
    name a place (`structural_tag#/format/tags/0/content/json_schema`), the tool and the pointer into its schema."""

    fields: dict[str, Any]
    places: dict[str, tuple[str, str]]


def has_json_arguments(tool_format: ToolFormat) -> bool:
    """Whether a grammar can have a JSON object in the place of the arguments."""
    return tool_format.shape is not None and tool_format.shape.argument is None


def forced_format(tool_format: ToolFormat | None) -> ToolFormat:
    """The format of an answer that `forced_calls` governs. Text without quotes, which a model that is made to write it
    may never end, is not forced."""
    return tool_format if tool_format is not None and has_json_arguments(tool_format) else JsonList()


def forced_openings(tool_format: ToolFormat | None, names: Iterable[str]) -> tuple[str, ...]:
    shape = forced_format(tool_format).shape
    if shape is None:
        return ("[",)
    return (shape.before,) if shape.before else tuple(shape.begin(name) for name in names)


def forced_calls(tool_format: ToolFormat | None, tools: Mapping[str, Schema], *, single: bool) -> CallGrammar:
    """What makes an answer nothing but calls of these tools: one if `single`, else one or more."""
    arguments = {name: arguments_schema(schema) for name, schema in tools.items()}
    shape = forced_format(tool_format).shape
    if shape is None:
        return _call_list(arguments, single=single)
    form, path = _calls_only(shape, arguments, single=single)
    return _tag_grammar(form, f"/format{path}", shape, arguments)


def can_watch(tool_format: ToolFormat | None, strict: Iterable[Schema]) -> bool:
    """Whether calls of this format can be told from other text by how they begin, and held to these schemas."""
    shape = None if tool_format is None else tool_format.shape
    if shape is None or not shape.trigger:
        return False
    return shape.argument is None or all(named_content(shape, arguments_schema(schema)) for schema in strict)


def watched_calls(
    tool_format: ToolFormat,
    tools: Mapping[str, Schema],
    strict: Collection[str],
    *,
    single: bool,
    otherwise: Mapping[str, Any] | None = None,
) -> CallGrammar:
    """What holds an answer to a format that `can_watch`, from where it begins a call: the name is a tool's, and the
    arguments of a tool that is `strict` match its schema. An answer without calls is free text, or has the format
    `otherwise` of a structural tag."""
    shape = tool_format.shape
    assert shape is not None, "a format that cannot be watched"
    arguments = {name: arguments_schema(tools[name]) if name in strict else ANY_ARGUMENTS for name in tools}
    if otherwise is not None:
        form, path = _calls_only(shape, arguments, single=single)
        either = {"type": "or", "elements": [form, otherwise]}
        return _tag_grammar(either, f"/format/elements/0{path}", shape, arguments)
    if shape.before:
        section = _tags(shape, arguments, single=single)
        tags, path = [{"type": "tag", "begin": shape.before, "content": section, "end": shape.after}], "/tags/0/content"
    else:
        tags, path = [_tag(shape, name, schema) for name, schema in arguments.items()], ""
    form = {"type": "triggered_tags", "triggers": [shape.trigger], "tags": tags, "stop_after_first": single}
    return _tag_grammar(form, f"/format{path}", shape, arguments)


def arguments_schema(schema: Schema) -> Schema:
    """The schema of a call's arguments. A tool that declares no parameters has none, rather than any."""
    if not schema:
        return NO_ARGUMENTS
    if schema.get("properties") == {} and WITHOUT_NAMES.issuperset(schema):
        return {**schema, "additionalProperties": False}
    return schema


def _tag_grammar(form: dict[str, Any], path: str, shape: Shape, arguments: Mapping[str, Schema]) -> CallGrammar:
    """`path` leads to the tags in the format, one for each tool."""
    places = {}
    for i, (name, schema) in enumerate(arguments.items()):
        content = f"structural_tag#{path}/tags/{i}/content"
        if shape.argument is None:
            places[f"{content}/json_schema"] = name, ""
        else:
            places |= {f"{content}{inside}": (name, pointer) for inside, pointer in schema_places(schema)}
    return CallGrammar({"structural_tag": {"type": "structural_tag", "format": form}}, places)


def _calls_only(shape: Shape, arguments: Mapping[str, Schema], *, single: bool) -> tuple[dict[str, Any], str]:
    """The format of an answer that is nothing but calls, and the way in it to the tags."""
    tags = _tags(shape, arguments, single=single)
    around = [{"type": "const_string", "value": text} if text else None for text in (shape.before, shape.after)]
    elements = [element for element in (around[0], tags, around[1]) if element is not None]
    if len(elements) == 1:
        return tags, ""
    return {"type": "sequence", "elements": elements}, f"/elements/{elements.index(tags)}"


def _tags(shape: Shape, arguments: Mapping[str, Schema], *, single: bool) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [_tag(shape, name, schema) for name, schema in arguments.items()],
        "separator": shape.between,
        "at_least_one": True,
        "stop_after_first": single,
    }


def _tag(shape: Shape, name: str, schema: Schema) -> dict[str, Any]:
    content: dict[str, Any] | None = {"type": "json_schema", "json_schema": schema}
    if shape.argument is not None:
        content = {"type": "any_text"} if schema is ANY_ARGUMENTS else named_content(shape, schema)
    assert content is not None, "arguments that do not fit the shape"
    return {"type": "tag", "begin": shape.begin(name), "content": content, "end": shape.end}


def _call_list(arguments: Mapping[str, Schema], *, single: bool) -> CallGrammar:
    """A list of calls. A schema that refers to its own parts moves to the definitions, and its references with it."""
    definitions: dict[str, Any] = {}
    choices = []
    places = {}
    for i, (name, schema) in enumerate(arguments.items()):
        parameters: Any = schema
        path = "/items/properties" if len(arguments) == 1 else f"/items/anyOf/{i}/properties"
        places[f"json_schema#{path}/parameters"] = name, ""
        if refers(parameters):
            definitions[name] = _moved(parameters, name)
            parameters = {"$ref": _pointer(name)}
            places[f"json_schema{_pointer(name)}"] = name, ""
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
    return CallGrammar({"json_schema": listed | ({"$defs": definitions} if definitions else {})}, places)


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
    return f"#/$defs/{_step(name)}"


# ---- arguments that stand one by one
#
# A parameter that is a string and nothing more is any text up to the marker that ends it; any other is JSON. A schema
# that says more (strings with a pattern, undeclared names) has no such grammar.


ABOUT = frozenset({"title", "description", "default", "examples", "$comment"})  # what only informs
OF_ARGUMENTS = ABOUT | {"type", "properties", "required", "additionalProperties", "$schema", "$id"}
NAME = re.compile(r"[\w.\-]{1,100}")  # so that a name cannot be taken for a marker of some format
NOTHING = {"type": "regex", "pattern": "\\n?"}


def named_content(shape: Shape, schema: Schema) -> dict[str, Any] | None:
    """The arguments of one call, in the order of the schema; None where the schema says more than can be said so."""
    assert shape.argument is not None, "a format that writes arguments as JSON"
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
        begin = shape.argument(name, value["type"] != "json_schema")
        tag = {"type": "tag", "begin": begin, "content": value, "end": shape.argument_end}
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
