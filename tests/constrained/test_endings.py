"""What never comes to an end is taken out of grammars, or the grammar is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from bough.constrained.prepare import prepare
from bough.core.errors import RequestError
from tests.constrained.walks import accepts, matcher_of
from tests.fakes.grammar_specs import ebnf_spec, json_schema_spec

ENDLESS_OBJECT = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize(
    "grammar", ["root ::= root", 'root ::= "a" root', "root ::= one\none ::= two\ntwo ::= one+", "root ::= root{2}"]
)
def test_a_grammar_that_derives_nothing_is_refused(backend: str, grammar: str) -> None:
    with pytest.raises(RequestError, match="never comes to an end") as refused:
        prepare(ebnf_spec(grammar), backend)
    assert refused.value.field == "ebnf" and refused.value.status_code == 400


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_options_that_derive_nothing_are_left_out(backend: str) -> None:
    matcher = matcher_of(ebnf_spec('root ::= "a" loop | "b" loop? | "c"\nloop ::= "x" loop'), backend)
    assert matcher.accept(ord("b")) and matcher.can_end and not matcher.accept(ord("x"))
    matcher.rollback(1)
    assert not matcher.accept(ord("a")) and accepts(matcher, "c")


@pytest.mark.parametrize(
    "schema",
    [
        ENDLESS_OBJECT,
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$defs": {"t": ENDLESS_OBJECT | {"properties": {"a": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"},
        {"anyOf": [{"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, {"$ref": "#"}]},
    ],
    ids=str,
)
def test_a_schema_without_a_finite_value_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="comes to an end"):
        prepare(json_schema_spec(schema), "xgrammar")


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_parts_without_a_finite_value_are_left_out(backend: str) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "required": ["a"]}
    schema = {
        "$defs": {"t": endless},
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "t": {"$ref": "#/$defs/t"},
            "l": {"items": {"$ref": "#/$defs/t"}, "type": "array"},
        },
        "required": ["n"],
    }
    matcher = matcher_of(json_schema_spec(schema), backend)
    assert accepts(matcher, '{"n": 1}') and accepts(matcher, '{"n": 1, "l": []}')
    for text in ('{"n": 1, "t', '{"n": 1, "l": [{'):
        taken = [matcher.accept(byte) for byte in text.encode()]
        assert not taken[-1]
        matcher.rollback(sum(taken))


def test_recursion_that_ends_is_left_alone() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    assert accepts(matcher_of(json_schema_spec(schema), "xgrammar"), '{"a": {"a": {}}}')


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("how", ["allOf", "$ref", "both"])
def test_choices_behind_what_a_schema_refers_to_come_to_an_end(backend: str, how: str) -> None:
    some = {"anyOf": [{"required": ["a"]}, {"required": ["b"], "properties": {"b": {"const": 2}}}]}
    behind = {
        "allOf": {"allOf": [some]},
        "$ref": {"$ref": "#/$defs/some"},
        "both": {"allOf": [{"$ref": "#/$defs/some"}]},
    }
    properties = {"a": {"const": 1}, "b": {"enum": [2, 3]}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False, "$defs": {"some": some}}
    matcher = matcher_of(json_schema_spec(schema | behind[how]), backend)
    for text in ("{}", '{"a": 1}', '{"b": 2}', '{"b": 3}', '{"a": 1, "b": 3}', '{"a": 1, "b": 2}'):
        assert accepts(matcher, text) == jsonschema.Draft202012Validator(schema | behind[how]).is_valid(
            json.loads(text)
        )
