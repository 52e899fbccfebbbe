"""Grammars of calls as the back ends enforce them: those that must come, and those of strict tools once they begin."""

from __future__ import annotations

from typing import Any

import pytest

from bough.constrained.interface import Matcher
from bough.constrained.spec import json_schema_spec, structural_tag_spec
from bough.parsers import TOOL_FORMATS, AnswerFormat, CallGrammar, can_watch, forced_calls, forced_format, watched_calls
from tests.constrained.walks import accepts, matcher_of

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: dict[str, dict[str, Any]] = {"weather": CITY, "now": {"type": "object", "properties": {}}}
BACKENDS = ("xgrammar", "llguidance")
FORCIBLE = [name for name, form in TOOL_FORMATS.items() if form.shape is not None]
WATCHED = [name for name, form in TOOL_FORMATS.items() if can_watch(form)]


def matcher(grammar: CallGrammar, backend: str) -> Matcher:
    if "json_schema" in grammar.fields:
        return matcher_of(json_schema_spec(grammar.fields["json_schema"]), backend)
    return matcher_of(structural_tag_spec(grammar.fields["structural_tag"]), backend)


def call(parser: str, *pairs: tuple[str, str]) -> str:
    """Calls in a format, with arguments as they are given."""
    shape = forced_format(TOOL_FORMATS[parser]).shape
    assert shape is not None
    calls = shape.between.join(f"{shape.begin(name)}{arguments}{shape.end}" for name, arguments in pairs)
    return f"{shape.before}{calls}{shape.after}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parser", FORCIBLE)
def test_an_answer_that_is_forced_is_nothing_but_calls(parser: str, backend: str) -> None:
    grammar = matcher(forced_calls(TOOL_FORMATS[parser], TOOLS, single=False), backend)
    text = call(parser, ("weather", '{"city": "Rome"}'), ("now", "{}"))
    assert accepts(grammar, text)
    parsed = AnswerFormat(tool_format=TOOL_FORMATS[parser], tools=TOOLS).parse(text)
    assert [each.name for each in parsed.calls] == ["weather", "now"]
    for wrong in ("Hello.", call(parser, ("weather", "{}")), call(parser, ("now", '{"a": 1}'))):
        assert not accepts(grammar, wrong), wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_that_is_forced_has_no_arguments_for_tools_without_parameters(backend: str) -> None:
    grammar = matcher(forced_calls(None, TOOLS, single=False), backend)
    assert accepts(grammar, '[{"name": "now", "parameters": {}}, {"name": "weather", "parameters": {"city": "Rome"}}]')
    assert not accepts(grammar, '[{"name": "now", "parameters": {"a": 1}}]')


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parser", WATCHED)
def test_strict_tools_are_held_to_their_schemas_once_a_call_begins(parser: str, backend: str) -> None:
    grammar = matcher(watched_calls(TOOL_FORMATS[parser], TOOLS, {"weather"}, single=False), backend)
    rome = call(parser, ("weather", '{"city": "Rome"}'))
    anything = call(parser, ("now", '{"a": [1]}'))  # it is not strict
    for text in ("Hello.", rome, f"I look.\n{rome}", f"{rome}\n{anything} Done.", "a < b"):
        assert accepts(grammar, text), text
    for wrong in (
        call(parser, ("weather", "{}")),
        f"I look.\n{call(parser, ('weather', '{' + chr(34) + 'city' + chr(34) + ': 1}'))}",
        call(parser, ("unknown", "{}")),
        call(parser, ("now", "[1]")),
    ):
        assert not accepts(grammar, wrong), wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parser", WATCHED)
def test_what_the_answer_must_match_holds_where_there_is_no_call(parser: str, backend: str) -> None:
    asked = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}}
    grammar = matcher(watched_calls(TOOL_FORMATS[parser], TOOLS, {"weather"}, single=True, otherwise=asked), backend)
    for text in ("[1, 2]", call(parser, ("weather", '{"city": "Rome"}'))):
        assert accepts(grammar, text), text
    for wrong in ("Hello.", '["a"]', call(parser, ("weather", "{}"))):
        assert not accepts(grammar, wrong), wrong
