"""What schemas say of numbers, strings and names, to the letter, in every back end; and what cannot be said, told."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from bough.constrained.prepare import prepare
from bough.core.errors import RequestError
from tests.constrained.walks import accepts, matcher_of, random_text
from tests.fakes.grammar_specs import json_schema_spec, structural_tag_spec

GROWN = ("xgrammar", "llguidance")
BOTH = pytest.mark.parametrize("backend", GROWN)
INT, TEXT = {"type": "integer"}, {"type": "string"}
MULTIPLE = {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100_000}

ALLOWED_AND_FORBIDDEN: list[tuple[Any, list[str], list[str]]] = [
    (MULTIPLE, ["0", "5", "100000"], ["3", "100005", "-5"]),
    ({"type": "integer", "multipleOf": 5, "minimum": 0}, ["0", "123450"], ["-5", "3"]),
    ({"type": "integer", "multipleOf": 10, "maximum": 1000}, ["-10", "1000"], ["1010", "15"]),
    ({"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0}, ["7", "700000000"], ["0", "8"]),
    ({"type": "number", "multipleOf": 2, "minimum": 0.5, "maximum": 5}, ["2", "4"], ["0", "6"]),
    ({"type": "number", "multipleOf": 0.25, "minimum": 1}, ["1.25", "3"], ["0.75", "1.3"]),
    ({"type": "string", "maxLength": 8}, ['"\\t"', '"a\\"b"', '"\\u0003"'], ['"\t"', '"\x03"', '"\n"', '"123456789"']),
    ({"type": "string", "minLength": 2}, ['"\\n\\n"'], ['"\\n"', '"\n\n"']),
    ({"properties": {"a": INT}, "additionalProperties": TEXT, "type": "object"},
     ['{"a": 1}', '{"b": "x"}', '{"a": 1, "ab": "x"}'], ['{"\\u0061": "x"}', '{"a": "x"}', '{"a": 1, "a": "x"}']),
    ({"patternProperties": {"^a": INT, "b$": {"minimum": 5, "type": "integer"}}, "additionalProperties": TEXT,
      "type": "object"},
     ['{"a": 1}', '{"ab": 5}', '{"x": "y"}'], ['{"\\u0061": "x"}', '{"ab": 1}', '{"b": 1}', '{"a": "x"}']),
    ({"const": -(2**63)}, ["-9223372036854775808"], ["-9.223372036854776e18"]),
    ({"const": 12345678901234567890}, ["12345678901234567890"], ["1.2345678901234567e+19"]),
    ({"enum": [0.1, 10**30]}, ["0.1", "1" + "0" * 30], ["0.10000000000000001", "1e+30"]),
    ({"type": "number", "minimum": 1.00000001, "maximum": 1.00000002}, ["1.000000015", "1.00000001"], ["1.0", "1.1"]),
    ({"type": "number", "minimum": 1 / 3, "maximum": 0.3333334}, ["0.3333334", "0.3333333333333333"], ["0.3333333"]),
    ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.0000000001}, ["1.00000000005"], ["1", "1.0"]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.001}, ["0.0005"], ["0", "0.0", "0.001", "-0"]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-9223372036854775808"], ["9223372036854775808"]),
    ({"type": "number", "maximum": -9.223372036854776e18}, ["-9223372036854775808"], ["-9223372036854775807"]),
    ({"type": "integer", "minimum": -(10**400), "maximum": 10**400}, ["0", "-17"], ["0.5"]),
    ({"type": "string", "pattern": "^[\\x00-\\x1f]+$"}, ['"\\u0001"', '"\\n"'], ['"\\""', '"\x01"']),
    ({"type": "string", "pattern": "^[a-z]+( [a-z]+)*$", "minLength": 4, "maxLength": 6},
     ['"ab cd"'], ['"a b"', '"abcdefg"']),
    ({"type": "string", "format": "email", "maxLength": 40}, ['"a@b.example"'], ['"a@b.example' + "e" * 40 + '"']),
    ({"type": "string", "pattern": "^a", "allOf": [{"pattern": "b$"}]}, ['"ab"', '"a b"'], ['"a"', '"b"']),
    ({"type": "string", "format": "date"}, ['"0001-12-31"'], ['"0000-01-01"']),
    ({"type": "object", "properties": {"a": INT, "b": INT, "c": INT}, "maxProperties": 1},
     ["{}", '{"b": 1}'], ['{"a": 1, "b": 1}']),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize(("schema", "good", "bad"), ALLOWED_AND_FORBIDDEN, ids=lambda value: json.dumps(value)[:60])
def test_to_the_letter(backend: str, schema: Any, good: list[str], bad: list[str]) -> None:
    matcher = matcher_of(json_schema_spec(schema), backend)
    wanted = dict.fromkeys(good, True) | dict.fromkeys(bad, False)
    assert {text: accepts(matcher, text) for text in wanted} == wanted


@BOTH
def test_strings_are_json_whatever_is_sampled(backend: str) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 6}}, "additionalProperties": TEXT}
    for seed in range(10):
        said = random_text(matcher_of(json_schema_spec(schema), backend), random.Random(seed))
        assert said is None or all(isinstance(value, str) for value in json.loads(said).values())


@BOTH
def test_tags_hold_the_same_schemas(backend: str) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": MULTIPLE, "end": "</f>"}], "triggers": ["<f"]}
    matcher = matcher_of(structural_tag_spec(tag), backend)
    assert accepts(matcher, "<f>15</f>") and not accepts(matcher, "<f>16</f>")


# ---- what takes too long, or cannot be said

HOSTILE: dict[str, Any] = {
    "a pattern that backtracks, on a name": {
        "type": "object", "properties": {"a" * 40 + "b": {}}, "patternProperties": {"^(a+)+$": {"type": "null"}},
    },
    "a pattern that backtracks, on a value": {"enum": ["a" * 40 + "b", "aa"], "pattern": "^(a+)+$"},
    "the same under an older draft": {
        "$schema": "http://json-schema.org/draft-07/schema#", "enum": ["a" * 40 + "b", "aa"], "pattern": "^(a+)+$",
    },
    "many branches of many values": {"oneOf": [{"enum": [f"{i}-{j}" for j in range(10)]} for i in range(1000)]},
    "many tagged objects": {"oneOf": [
        {"type": "object", "properties": {"k": {"const": f"c{i}"}}, "required": ["k"]} for i in range(400)
    ]},
    "many values": {"type": "string", "enum": [f"v{i}" for i in range(10_000)]},
    "many values, several times": {"allOf": [{"enum": list(range(10_000))}, {"type": "integer"}, {"minimum": 9_990}]},
    "many properties": {
        "type": "object", "properties": {f"p{i}": TEXT for i in range(4000)}, "additionalProperties": INT,
    },
    "many patterns of names": {"type": "object", "patternProperties": {f"^x{i}_": INT for i in range(40)}},
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", HOSTILE)
def test_schemas_that_look_innocent_are_lowered_at_once(name: str, backend: str) -> None:
    """Each took from a minute to for ever where a client's patterns ran by backtracking, or each met each."""
    assert prepare(json_schema_spec(HOSTILE[name]), backend).warnings == ()


def test_a_value_that_takes_too_many_steps_to_judge_is_told() -> None:
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    schema = {"enum": [1], "$ref": "#/$defs/d0", "$defs": {**doubling, "d30": {"type": "integer", "minimum": 2}}}
    with pytest.raises(RequestError, match=r"#/.*too many"):
        prepare(json_schema_spec(schema), "xgrammar")


GAPS: list[tuple[Any, str]] = [
    ({"type": "string", "pattern": "a(?=b)"}, "#/pattern"),
    ({"type": "string", "pattern": "\\bword\\b"}, "#/pattern"),
    ({"type": "string", "pattern": "^\\p{L}+$"}, "#/pattern"),
    ({"type": "object", "patternProperties": {"(?!a)": INT}}, "#/patternProperties/(?!a)"),
    ({"type": "string", "maxLength": 65535}, "#/maxLength"),
    ({"type": "array", "maxItems": 10**7}, "#/maxItems"),
    ({"type": "object", "properties": {"a": {"$ref": "https://example.com/s.json"}}}, "#/properties/a/$ref"),
    ({"$ref": "#/$defs/nowhere"}, "#/$ref"),
    ({"type": "number", "multipleOf": 0.1}, "#/multipleOf"),
    ({"type": "integer", "multipleOf": 99_991}, "#/multipleOf"),
    ({"type": "integer", "divisibleBy": 3}, "#/divisibleBy"),
    ({"enum": [1, 2], "disallow": "integer"}, "#/disallow"),
    ({"anyOf": [{"extends": {"type": "integer"}}]}, "#/anyOf/0/extends"),
    ({"type": "object", "properties": {"a": {"type": "integer", "required": True}}}, "#/properties/a/required"),
    ({"type": "string", "contentEncoding": "base64"}, "#/contentEncoding"),
    ({"type": "string", "contentMediaType": "application/json"}, "#/contentMediaType"),
]


@pytest.mark.parametrize("strict", [True, False])
def test_keywords_that_say_nothing_are_told_once_and_refuse_nobody(strict: bool) -> None:
    text = {"type": "string", "maxLenght": 3, "x-order": 1, "title": "T", "deprecated": True, "examples": ["a"]}
    schema = {
        "type": "object",
        "properties": {"a": text, "nullable": text, "b": {"nullable": True, "enum": [{"q": 1}]}},
    }
    says = "is no keyword of JSON Schema: it says nothing"
    told = prepare(json_schema_spec(schema, strict=strict), "xgrammar").warnings
    assert told == (
        f"json_schema#/properties/a/maxLenght {says}",
        f"json_schema#/properties/b/nullable {says}",
    )
    tag = {"structures": [{"begin": "<f>", "schema": {"foo": 1}, "end": "</f>"}], "triggers": ["<f"]}
    told = prepare(structural_tag_spec(tag, strict=strict), "xgrammar").warnings
    assert told == (f"structural_tag#/structures/0/schema/foo {says}",)


@BOTH
@pytest.mark.parametrize(("schema", "path"), GAPS, ids=lambda value: json.dumps(value)[:50])
def test_what_cannot_be_enforced_is_refused_or_warned_of_by_its_path(backend: str, schema: Any, path: str) -> None:
    (warning,) = prepare(json_schema_spec(schema, strict=False), backend, "response_format").warnings
    assert warning.startswith(f"response_format{path} ")
    with pytest.raises(RequestError) as caught:
        prepare(json_schema_spec(schema), backend, "response_format")
    assert f"response_format{path} " in str(caught.value) and caught.value.field == "response_format"
    assert matcher_of(json_schema_spec(schema, strict=False), backend)


@BOTH
def test_many_items_are_counted(backend: str) -> None:
    matcher = matcher_of(json_schema_spec({"type": "array", "items": INT, "minItems": 3, "maxItems": 100_000}), backend)
    assert accepts(matcher, "[1, 2, 3]") and not accepts(matcher, "[1, 2]")
