"""When a grammar governs the calls of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import pytest

from bough.core.errors import RequestError
from bough.parsers import TOOL_FORMATS
from bough.server import parsing
from bough.server.anthropic.requests import CountTokensRequest, read_tools
from bough.server.openai.requests import choose_tools
from bough.server.parsing import AnswerPlan, ToolUse, read_function, read_functions
from bough.tokenizer.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class SpecialTokens:
    """A tokenizer of which nothing is known but some texts that are special tokens."""

    def __init__(self, *texts: str) -> None:
        self.special_ids = frozenset(range(len(texts)))
        self._texts = texts

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        assert not add_special_tokens
        return [[i for i, special in enumerate(self._texts) if special in text] + [1000] for text in texts]


def rules(parser: str, *special: str, strict: bool | None = True, must: bool = False) -> AnswerPlan:
    tool = read_function({"name": "f", "parameters": SCHEMA, "strict": strict}, "tools[0]")
    return AnswerPlan(
        ToolUse((tool,), must=must), TOOL_FORMATS[parser], tags=True, tokenizer=cast(Tokenizer, SpecialTokens(*special))
    )


@pytest.mark.parametrize("parser", ["hermes", "mistral", "kimi_k2", "glm45"])
def test_special_tokens_are_left_to_the_model(parser: str) -> None:
    shape = TOOL_FORMATS[parser].shape
    assert shape is not None
    assert rules(parser, "<|im_end|>").watched and rules(parser).assured == {"f"}
    for marker in shape.markers:
        hidden = rules(parser, marker)
        assert not hidden.watched and not hidden.assured and hidden.grammar({}) is None
        assert rules(parser, marker, must=True).grammar({}) is not None  # what must come is spelt


@pytest.mark.parametrize(
    ("given", "strict", "kind"),
    [
        ({}, True, "triggered_tags"),
        ({}, None, None),
        ({"json_schema": SCHEMA}, None, "or"),
        ({"json_schema": "$$ANY$$"}, True, "or"),
        ({"regex": "a"}, True, "or"),
        ({"regex": "a"}, None, None),
        ({"choices": ["a", "b"]}, True, "or"),
        ({"ebnf": 'root ::= "a"'}, True, "or"),
        ({"regex": "", "stop": None}, True, None),
    ],
)
def test_what_stands_beside_calls(given: dict[str, Any], strict: bool | None, kind: str | None) -> None:
    grammar = rules("hermes", strict=strict).grammar(given)
    assert (None if grammar is None else grammar.fields["structural_tag"]["format"]["type"]) == kind


@pytest.mark.parametrize("parser", ["hermes", "glm45", "gemma4"])
@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize(
    "odd",
    [
        {"required": [{}]},
        {"required": 3},
        {"properties": 3},
        {"properties": {"a": {"type": "string", "enum": 3}}},
        {"properties": {"a": {"type": ["string", 3], "enum": [[]]}}},
        {"type": ["object"], "properties": {"": {"type": "integer"}}},
    ],
)
def test_odd_schemas_that_are_not_checked_are_the_engines_to_judge(
    monkeypatch: pytest.MonkeyPatch, parser: str, must: bool, odd: dict[str, Any]
) -> None:
    monkeypatch.setattr(parsing, "_wrong_schema", lambda schema: None)
    tool = read_function({"name": "f", "parameters": odd, "strict": True}, "tools[0]")
    AnswerPlan(ToolUse((tool,), must=must), TOOL_FORMATS[parser], tags=True).grammar({})


@pytest.mark.parametrize("end", [{"type": "null"}, {"$ref": "#"}])
def test_schemas_may_be_nested_deep(end: dict[str, Any]) -> None:
    for _ in range(400):
        end = {"type": "object", "properties": {"a": end}}
    tool = read_function({"name": "f", "parameters": end, "strict": True}, "tools[0]")
    for parser in ("hermes", "glm45", "gemma4"):
        use = AnswerPlan(ToolUse((tool,), must=True), TOOL_FORMATS[parser], tags=True)
        try:
            assert use.grammar({}) is not None
        except RequestError as error:
            assert "nested too deep" in str(error) and "$ref" in str(end)


def test_a_tag_of_ones_own_and_strict_tools_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="set strict to false"):
        rules("hermes").grammar({"structural_tag": {}})


# ---- tools of a hostile client: reading them must not hold up the event loop


def tools_of(*schemas: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": s}} for i, s in enumerate(schemas)]


def test_schemas_of_tools_are_checked_up_to_a_size_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    monkeypatch.setattr(parsing, "_wrong_schema", looked.append)
    large = {"description": "x" * (parsing.MAX_CHECKED_SCHEMAS // 4)}
    assert len(read_functions(tools_of(*[large] * 1000))) == 1000
    assert len(looked) == 3


def test_patterns_in_schemas_of_tools_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class such as this one takes Python's compiler ten milliseconds, and hundreds fit into a schema."""
    compile_pattern, compiled = re.compile, list[Any]()

    def noted(pattern: Any, *flags: Any) -> Any:
        compiled.append(pattern)
        return compile_pattern(pattern, *flags)

    slow = "(?i)[ -\U0010ffff]"
    with monkeypatch.context() as patched:
        patched.setattr(re, "compile", noted)
        assert read_functions(tools_of({"patternProperties": {slow: {}}, "properties": {"p": {"pattern": slow}}}))
    assert slow not in compiled


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (tools_of(*[{}] * 1025), "tools has 1025 entries; at most 1024 are taken"),
        (tools_of(*[{"enum": [0] * 50_000}] * 3), "tools holds more than 131072 values"),
    ],
)
def test_more_tools_than_anybody_could_mean_are_refused(tools: list[dict[str, Any]], said: str) -> None:
    flat = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in tools]
    with pytest.raises(RequestError, match=said):
        read_functions(tools)
    with pytest.raises(RequestError, match=said):
        read_tools(CountTokensRequest(messages=[], tools=flat))
    with pytest.raises(RequestError, match="tool_choice has 1025 entries"):
        choose_tools((), {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}] * 1025}})
