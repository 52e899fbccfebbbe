"""What is refused before any back end sees it, and how it is said; what is pathological ends in a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bough.constrained.interface import GrammarSpec
from bough.constrained.prepare import prepare
from bough.core.errors import RequestError
from tests.fakes.grammar_specs import choice_spec, ebnf_spec, json_schema_spec, regex_spec, structural_tag_spec


def deep(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def product(width: int, depth: int) -> Any:
    """Every `anyOf` doubles what has to be written out."""
    return {
        "allOf": [{"anyOf": [{"properties": {f"p{d}_{w}": {"const": w}}} for w in range(width)]} for d in range(depth)]
    }


STRUCTURE = {"begin": "<a>", "schema": {}, "end": ""}
REFUSED = [
    (regex_spec("(a"), "not valid"),
    (regex_spec("a(?=b)"), "look-around"),
    (regex_spec("(a)\\1"), "back reference"),
    (regex_spec("a^b"), "an anchor .* only at the pattern's ends"),
    (regex_spec("\\bfoo"), r"a word boundary \(.b, .B\) cannot be enforced"),
    (regex_spec("foo\\B"), r"foo.*a word boundary"),
    (regex_spec("((a{1,100}){1,100}){1,100}"), "too large"),
    (regex_spec("(" * 200 + "a" + ")" * 200), "nested|not valid"),
    (ebnf_spec("start ::= 'a'"), "line 1"),
    (ebnf_spec('start ::= "a"'), "no rule named 'root'"),
    (ebnf_spec('root ::= "a" other'), "'other' is not defined"),
    (ebnf_spec('root ::= "a"\nroot ::= "b"'), "line 2: the rule 'root' is defined twice"),
    (ebnf_spec('root ::= ("a"'), "not closed"),
    (ebnf_spec("root ::= [z-a]"), "backwards"),
    (ebnf_spec('root ::= "a"{5,2}'), "backwards"),
    (json_schema_spec({"type": "strin"}), "json_schema#/type is not valid JSON Schema"),
    (json_schema_spec({"$ref": "#/$defs/x"}), "not in the schema"),
    (json_schema_spec({"$ref": "https://example.com/s.json"}), "put what it names under"),
    (json_schema_spec(False), "allows no value"),
    (json_schema_spec({"type": "integer", "minimum": 3, "maximum": 2}), "allows no value"),
    (json_schema_spec({"type": "string", "pattern": "(?<!a)b"}), "#/pattern.*look-around"),
    (json_schema_spec({"enum": [f"v{index}" for index in range(20_000)]}), "20000 values"),
    (json_schema_spec(deep(100)), "nested deeper"),
    (json_schema_spec({"type": "string", "maxLength": 10**9}), "#/maxLength .*nothing is counted beyond"),
    (json_schema_spec(product(12, 12)), "combinations of subschemas"),
    (json_schema_spec({"description": "x" * 300_000}), "characters"),
    (structural_tag_spec({"type": "structural_tag"}), "needs either"),
    (structural_tag_spec({"format": {"type": "json"}}), "unknown type"),
    (structural_tag_spec({"format": {"type": ["regex"]}}), "unknown type"),
    (json_schema_spec({"enum": [1e308], "multipleOf": 10**400}), "too large to be divided|allows no value"),
    (structural_tag_spec({"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<a"]}), "begin, schema and end"),
    (structural_tag_spec({"structures": [STRUCTURE], "triggers": ["<a"], "at_least_one": True}), "#/at_least_one"),
    (structural_tag_spec({"structures": [{**STRUCTURE, "style": "x"}], "triggers": ["<a"]}), "#/structures/0/style"),
    (structural_tag_spec({"structures": [{**STRUCTURE, "schema": "{"}], "triggers": ["<a"]}), "not valid JSON"),
    (structural_tag_spec({"format": {"type": "any_text"}, "stop": True}), "#/stop"),
    (structural_tag_spec({"format": {"type": "regex", "pattern": "(a"}}), "#/format/pattern"),
    (structural_tag_spec({"format": {"type": "const_string", "value": "a", "lang": "x"}}), "#/format/lang"),
    (
        structural_tag_spec({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}),
        "one trigger",
    ),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "outlines-core"])
def test_refusals(spec: GrammarSpec, reason: str, backend: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        prepare(spec, backend)
    assert caught.value.field and caught.value.status_code == 400


def test_what_clients_write_becomes_one_text() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}

    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return schema

    specs = {json_schema_spec(schema), json_schema_spec(json.dumps(schema, indent=2)), json_schema_spec(Model)}
    assert [spec.text for spec in specs] == ['{"type":"object","properties":{"b":{},"a":{}}}']
    assert choice_spec(["a", "b", "a"]).text == '["a", "b"]'


@pytest.mark.parametrize("bad", ["{", "[1]", 3, "nope"])
def test_what_is_no_schema_is_told_so(bad: Any) -> None:
    with pytest.raises(RequestError) as caught:
        json_schema_spec(bad)
    assert caught.value.field == "json_schema"


def test_both_forms_of_a_tag_are_one() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    short = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f"],
    }
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    long = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}}
    quoted = {**short, "structures": [{"begin": "<f>", "schema": json.dumps(schema), "end": "</f>"}]}
    forms = (short, json.dumps(long), quoted)
    prepared = [json.loads(prepare(structural_tag_spec(form), "xgrammar").spec.text) for form in forms]
    assert prepared[0] == prepared[1] == prepared[2]


def test_gaps_inside_a_tag_have_their_path() -> None:
    tag = {
        "structures": [{"begin": "<f>", "schema": {"type": "array", "uniqueItems": True}, "end": ""}],
        "triggers": ["<"],
    }
    (warning,) = prepare(structural_tag_spec(tag, strict=False), "xgrammar").warnings
    assert warning.startswith("structural_tag#/structures/0/schema/uniqueItems")


def test_a_strict_refusal_names_the_fields_that_are_not() -> None:
    with pytest.raises(RequestError, match="uniqueItems") as caught:
        prepare(json_schema_spec({"type": "array", "uniqueItems": True}), "xgrammar")
    assert "strict: false for a schema in response_format, text.format or tools" in caught.value.message
    assert "grammar_strict: false in native sampling_params" in caught.value.message


def test_preparing_needs_no_back_end() -> None:
    code = (
        "import sys, bough.constrained.prepare, bough.constrained.compiler, tests.fakes.grammar_specs as s\n"
        "bough.constrained.prepare.prepare(s.json_schema_spec({'type': 'object'}), 'xgrammar')\n"
        "print(sorted({'torch', 'xgrammar', 'llguidance', 'outlines_core', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
