"""The grammar of a call that must come: what it allows is what the parser reads back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bough.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormat,
    forced_calls,
    forced_format,
    forced_openings,
)

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: dict[str, dict[str, Any]] = {"weather": WEATHER, "now": {}}


def written(grammar: dict[str, Any], arguments: dict[str, str], calls: int) -> str:
    """A text that a structural tag allows."""
    around = grammar["elements"] if grammar["type"] == "sequence" else [grammar]
    text = ""
    for element in around:
        if element["type"] == "const_string":
            text += element["value"]
            continue
        tags = [tag["begin"] + arguments[tag["begin"]] + tag["end"] for tag in element["tags"][:calls]]
        text += element["separator"].join(tags)
    return text


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("single", [True, False])
def test_a_forced_call_can_be_read_back(name: str, single: bool) -> None:
    tool_format = TOOL_FORMATS[name]
    forced = forced_calls(tool_format, TOOLS, single=single)
    reader = AnswerFormat(tool_format=forced_format(tool_format), tools=TOOLS)
    if tool_format.shape is None:
        assert set(forced) == {"json_schema"}
        text = json.dumps([{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "now", "parameters": {}}])
        assert forced["json_schema"].get("maxItems") == (1 if single else None)
    else:
        grammar = forced["structural_tag"]["format"]
        begins = [tool_format.shape.begin(tool) for tool in TOOLS]
        text = written(grammar, dict(zip(begins, ['{"city": "Rome"}', "{}"], strict=True)), 2)
        tags = grammar if "tags" in grammar else grammar["elements"][1]
        assert tags["stop_after_first"] is single
        assert [tag["content"]["json_schema"] for tag in tags["tags"]] == [
            WEATHER,
            {"type": "object", "properties": {}},
        ]
    parsed = reader.parse(text)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [
        ("weather", {"city": "Rome"}),
        ("now", {}),
    ]
    assert not parsed.text


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "glm45"])
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
    if shape is not None:
        call = f"{shape.before}{shape.begin('now')}{{}}{shape.end}{shape.after}"
    for text, thought in ((call, ""), (f"Hm.</think>{call}", "Hm.")):
        parsed = form.parse(text)
        assert ([call.name for call in parsed.calls], parsed.reasoning, parsed.text) == (["now"], thought, "")


def test_without_a_format_calls_are_forced_as_a_list() -> None:
    only = forced_calls(None, {"weather": WEATHER}, single=True)["json_schema"]
    assert only["items"]["properties"] == {"name": {"const": "weather"}, "parameters": WEATHER}
    assert (only["minItems"], only["maxItems"]) == (1, 1)


def test_schemas_that_refer_to_their_own_parts_keep_their_meaning_in_a_list() -> None:
    tree = {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}, "far": {"$ref": "https://x/y"}},
        "$defs": {"node": {"type": "object"}},
    }
    schema = forced_calls(TOOL_FORMATS["glm45"], {"tree": tree, "now": {}}, single=False)["json_schema"]
    moved = schema["$defs"]["tree"]
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == {"$ref": "#/$defs/tree"}
    assert moved["properties"]["root"] == {"$ref": "#/$defs/tree/$defs/node"}
    assert moved["properties"]["again"] == {"$ref": "#/$defs/tree"}
    assert moved["properties"]["far"] == {"$ref": "https://x/y"}
