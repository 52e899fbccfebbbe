"""Grammars of calls as the back ends enforce them: those that must come, and those of strict tools once they begin."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import validate

from bough.constrained.interface import Matcher
from bough.parsers import TOOL_FORMATS, AnswerFormat
from bough.parsers.forcing import (
    CallGrammar,
    arguments_schema,
    can_watch,
    forced_calls,
    forced_format,
    watched_calls,
)
from tests.constrained.walks import accepts, matcher_of, random_text
from tests.fakes.grammar_specs import json_schema_spec, structural_tag_spec
from tests.parsers.test_parsers_round_trip import ALIASES
from tests.parsers.writers import in_shape

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "scale": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1},
    },
    "required": ["city", "days"],
}
TOOLS: dict[str, dict[str, Any]] = {"weather": CITY, "now": {"type": "object", "properties": {}}}
ROME, HOT = {"city": "Rome", "days": 2}, {"city": "Rome <b>\n", "scale": "F", "days": 12}
WRONG: list[dict[str, Any]] = [
    {},
    {"city": "Rome"},
    {"days": 2},
    {"city": "Rome", "days": 0},
    {"city": "Rome", "scale": "K", "days": 2},
    {"city": "Rome", "days": 2, "more": 1},
]
NO_CALL = {"type": "const_string", "value": "-"}
BACKENDS = ("xgrammar", "llguidance")
DISTINCT = {name: form for name, form in TOOL_FORMATS.items() if name not in (*ALIASES, "glm47", "deepseekv4")}
FORCIBLE = [name for name, form in DISTINCT.items() if forced_format(form).shape is not None]
WATCHED = [name for name, form in DISTINCT.items() if can_watch(form, [CITY])]
NAMED = [name for name in WATCHED if name not in FORCIBLE]


def matcher(grammar: CallGrammar, backend: str) -> Matcher:
    if "json_schema" in grammar.fields:
        return matcher_of(json_schema_spec(grammar.fields["json_schema"]), backend)
    return matcher_of(structural_tag_spec(grammar.fields["structural_tag"]), backend)


def call(parser: str, *calls: tuple[str, Any]) -> str:
    """Calls in a format."""
    shape = TOOL_FORMATS[parser].shape
    assert shape is not None
    return in_shape(shape, calls)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parser", FORCIBLE)
def test_an_answer_that_is_forced_is_nothing_but_calls(parser: str, backend: str) -> None:
    grammar = matcher(forced_calls(TOOL_FORMATS[parser], TOOLS, single=False), backend)
    for arguments in (ROME, HOT):
        text = call(parser, ("weather", arguments), ("now", {}))
        assert accepts(grammar, text), text
        parsed = AnswerFormat(tool_format=TOOL_FORMATS[parser], tools=TOOLS).parse(text)
        assert [(each.name, json.loads(each.arguments)) for each in parsed.calls] == [
            ("weather", arguments),
            ("now", {}),
        ]
    for wrong in ("Hello.", call(parser, ("now", {"a": 1})), *(call(parser, ("weather", each)) for each in WRONG)):
        assert not accepts(grammar, wrong), wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_that_is_forced_has_no_arguments_for_tools_without_parameters(backend: str) -> None:
    grammar = matcher(forced_calls(None, TOOLS, single=False), backend)
    calls = [{"name": "now", "parameters": {}}, {"name": "weather", "parameters": ROME}]
    assert accepts(grammar, json.dumps(calls))
    assert not accepts(grammar, '[{"name": "now", "parameters": {"a": 1}}]')


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parser", WATCHED)
def test_strict_tools_are_held_to_their_schemas_once_a_call_begins(parser: str, backend: str) -> None:
    grammar = matcher(watched_calls(TOOL_FORMATS[parser], TOOLS, {"weather"}, single=False), backend)
    rome = call(parser, ("weather", ROME))
    anything = call(parser, ("now", {"a": [1]}))  # it is not strict
    for text in ("Hello.", rome, f"I look.\n{rome}", f"{rome}\n{anything} Done.", "a < b"):
        assert accepts(grammar, text), text
    for wrong in (call(parser, ("unknown", {})), *(f"I look.\n{call(parser, ('weather', each))}" for each in WRONG)):
        assert not accepts(grammar, wrong), wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parser", WATCHED)
def test_what_the_answer_must_match_holds_where_there_is_no_call(parser: str, backend: str) -> None:
    asked = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}}
    grammar = matcher(watched_calls(TOOL_FORMATS[parser], TOOLS, {"weather"}, single=True, otherwise=asked), backend)
    for text in ("[1, 2]", call(parser, ("weather", ROME))):
        assert accepts(grammar, text), text
    for wrong in ("Hello.", '["a"]', call(parser, ("weather", {}))):
        assert not accepts(grammar, wrong), wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parser", NAMED)
def test_whatever_is_sampled_of_a_watched_call_is_one(parser: str, backend: str) -> None:
    """Where arguments stand one by one, texts of parameters are free; what is read back is valid all the same."""
    grammar = watched_calls(TOOL_FORMATS[parser], TOOLS, TOOLS, single=True, otherwise=NO_CALL)
    chance, whole = random.Random(7), 0
    for _ in range(24):
        text = random_text(matcher(grammar, backend), chance, most=300)
        if text in (None, b"-"):  # it did not come to an end, or chose not to call
            continue
        assert text is not None
        whole += 1
        parsed = AnswerFormat(tool_format=TOOL_FORMATS[parser], tools=TOOLS).parse(text.decode(errors="replace"))
        assert len(parsed.calls) == 1 and not parsed.text, text
        made = parsed.calls[0]
        validate(json.loads(made.arguments), arguments_schema(TOOLS[made.name]))
    assert whole > 2
