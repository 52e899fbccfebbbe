"""The grammar of a call that must come: what it allows is what the parser reads back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bough.parsers import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from bough.parsers.forcing import (
    NO_ARGUMENTS,
    CallGrammar,
    arguments_schema,
    can_watch,
    forced_calls,
    forced_format,
    forced_openings,
    watched_calls,
)
from tests.parsers.writers import Given, in_shape

WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: dict[str, dict[str, Any]] = {"weather": WEATHER, "now": {}}


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("single", [True, False])
def test_a_forced_call_can_be_read_back(name: str, single: bool) -> None:
    tool_format = TOOL_FORMATS[name]
    forced = forced_calls(tool_format, TOOLS, single=single).fields
    reader = AnswerFormat(tool_format=forced_format(tool_format), tools=TOOLS)
    shape = forced_format(tool_format).shape
    calls: Given = [("weather", {"city": "Rome"}), ("now", {})]
    if shape is None:
        assert set(forced) == {"json_schema"}
        text = json.dumps([{"name": tool, "parameters": arguments} for tool, arguments in calls])
        assert forced["json_schema"].get("maxItems") == (1 if single else None)
    else:
        grammar = forced["structural_tag"]["format"]
        text = in_shape(shape, calls)
        tags = grammar if "tags" in grammar else grammar["elements"][1]
        assert tags["stop_after_first"] is single
        assert [tag["begin"] for tag in tags["tags"]] == [shape.begin(tool) for tool in TOOLS]
        assert [tag["content"]["json_schema"] for tag in tags["tags"]] == [WEATHER, NO_ARGUMENTS]
    parsed = reader.parse(text)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert not parsed.text


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "glm45", "gemma4"])
def test_a_forced_call_is_no_thinking_even_where_thinking_was_to_come(name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    form = AnswerFormat(
        reasoning=REASONING_FORMATS["deepseek-r1"],
        thinking=True,
        tool_format=forced_format(tool_format),
        tools=TOOLS,
        openings=forced_openings(tool_format, TOOLS),
    )
    shape = tool_format.shape
    call = '[{"name": "now", "parameters": {}}]'
    if shape is not None and shape.argument is None:
        call = in_shape(shape, [("now", {})])
    for text, thought in ((call, ""), (f"Hm.</think>{call}", "Hm.")):
        parsed = form.parse(text)
        assert ([call.name for call in parsed.calls], parsed.reasoning, parsed.text) == (["now"], thought, "")


def test_without_a_format_calls_are_forced_as_a_list() -> None:
    only = forced_calls(None, {"weather": WEATHER}, single=True).fields["json_schema"]
    assert only["items"]["properties"] == {"name": {"const": "weather"}, "parameters": WEATHER}
    assert (only["minItems"], only["maxItems"]) == (1, 1)


def test_schemas_that_refer_to_their_own_parts_keep_their_meaning_in_a_list() -> None:
    tree = {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}, "far": {"$ref": "https://x/y"}},
        "$defs": {"node": {"type": "object"}},
    }
    schema = forced_calls(TOOL_FORMATS["gemma4"], {"tree": tree, "now": {}}, single=False).fields["json_schema"]
    moved = schema["$defs"]["tree"]
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == {"$ref": "#/$defs/tree"}
    assert moved["properties"]["root"] == {"$ref": "#/$defs/tree/$defs/node"}
    assert moved["properties"]["again"] == {"$ref": "#/$defs/tree"}
    assert moved["properties"]["far"] == {"$ref": "https://x/y"}


def part_at(grammar: CallGrammar, place: str) -> Any:
    """What stands at a place, by its JSON pointer."""
    field, _, pointer = place.partition("#")
    found = grammar.fields[field]
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


@pytest.mark.parametrize("name", [*sorted(TOOL_FORMATS), None])
@pytest.mark.parametrize("count", [1, 2])
def test_the_places_of_a_grammar_are_those_of_the_tools_schemas(name: str | None, count: int) -> None:
    weather = {**WEATHER, "properties": {**WEATHER["properties"], "days": {"type": "integer"}}}
    tools = dict(list({"weather": weather, "now": {}}.items())[:count])
    tool_format = None if name is None else TOOL_FORMATS[name]
    grammar = forced_calls(tool_format, tools, single=False)
    found = {place: part_at(grammar, text) for text, place in grammar.places.items()}
    assert found == {(tool, ""): arguments_schema(schema) for tool, schema in tools.items()}
    if can_watch(tool_format, [weather]):
        assert tool_format is not None
        watched = watched_calls(tool_format, tools, {"weather"}, single=False)
        inside = {
            pointer: part_at(watched, text) for text, (tool, pointer) in watched.places.items() if tool == "weather"
        }
        assert inside in ({"": weather}, {"/properties/days": {"type": "integer"}})


def test_places_lead_into_schemas_that_moved() -> None:
    tree = {"type": "object", "properties": {"again": {"$ref": "#"}}}
    grammar = forced_calls(None, {"a/b~c": tree, "now": {}}, single=False)
    moved = next(place for place in grammar.places if "$defs" in place)
    assert grammar.places[moved] == ("a/b~c", "")
    assert part_at(grammar, moved)["properties"]["again"] == {"$ref": moved.removeprefix("json_schema")}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({}, True),
        ({"type": "object", "properties": {}}, True),
        ({"type": "object", "properties": {}, "required": [], "description": "Nothing."}, True),
        ({"type": "object", "properties": {}, "additionalProperties": True}, False),
        ({"type": "object", "properties": {}, "patternProperties": {"^x": {}}}, False),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {"a": {}}}, False),
    ],
)
def test_a_tool_without_parameters_has_no_arguments(schema: dict[str, Any], closed: bool) -> None:
    assert (arguments_schema(schema).get("additionalProperties") is False) is closed


@pytest.mark.parametrize("name", [name for name, form in sorted(TOOL_FORMATS.items()) if can_watch(form, [WEATHER])])
@pytest.mark.parametrize("otherwise", [None, {"type": "any_text"}])
def test_calls_of_strict_tools_are_watched(name: str, otherwise: dict[str, Any] | None) -> None:
    grammar = watched_calls(TOOL_FORMATS[name], TOOLS, {"weather"}, single=False, otherwise=otherwise)
    shape = TOOL_FORMATS[name].shape
    assert shape is not None
    if shape.argument is None:
        assert {tool: part_at(grammar, text) for text, (tool, _) in grammar.places.items()} == {
            "weather": WEATHER,
            "now": {"type": "object"},
        }
    form = grammar.fields["structural_tag"]["format"]
    if otherwise is None:
        assert form["triggers"] == [shape.trigger]
        assert all(tag["begin"].startswith(shape.trigger) for tag in form["tags"])
    else:
        assert form["type"] == "or" and form["elements"][1] == otherwise


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}},
        {"type": "object", "properties": {"a": {"type": ["string", "integer"]}}},
        {"type": "object", "properties": {"a": {"enum": ["x", 1]}}},
        {"type": "object", "properties": {"a": {"enum": ["x", " y"]}}},
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "null"}}},
        {"type": "object", "properties": {"a>b": {"type": "integer"}}},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 1},
        {"type": "object", "additionalProperties": {"type": "integer"}},
    ],
)
def test_what_cannot_be_said_one_by_one_is_not_watched(schema: dict[str, Any]) -> None:
    for name in ("glm45", "qwen3_coder", "minimax-m2", "deepseekv32"):
        assert not can_watch(TOOL_FORMATS[name], [schema])
    assert can_watch(TOOL_FORMATS["hermes"], [schema])
