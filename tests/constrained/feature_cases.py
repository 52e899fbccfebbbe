"""What there is to enforce, as small cases: one schema or grammar each, texts that it allows and texts that it forbids.

`test_features.py` asks every back end for each, and writes what it found into the table of docs/structured-output.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bough.constrained.interface import GrammarSpec
from tests.fakes.grammar_specs import choice_spec, ebnf_spec, json_schema_spec, regex_spec, structural_tag_spec


class Case(NamedTuple):
    """One feature: what it is called, what is asked, what must and must not be possible."""

    feature: str
    spec: GrammarSpec
    good: tuple[str, ...]
    bad: tuple[str, ...]


def schema(feature: str, value: Any, good: tuple[str, ...], bad: tuple[str, ...]) -> Case:
    return Case(feature, json_schema_spec(value), good, bad)


INT, TEXT = {"type": "integer"}, {"type": "string"}
NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
}
SHORT_TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f>", "schema": {"type": "object", "properties": {"a": INT}, "required": ["a"]}, "end": "</f>"}
    ],
    "triggers": ["<f"],
}
LONG_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "x="},
            {
                "type": "or",
                "elements": [{"type": "json_schema", "json_schema": INT}, {"type": "regex", "pattern": "[a-c]+"}],
            },
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
        ],
    },
}

CASES = [
    Case("`regex`", regex_spec("^[a-c]{2,3}\\d$"), ("ab1", "abc9"), ("a1", "abcd1", "ab1\n", "")),
    Case("`choice`", choice_spec(["red", "green (dark)"]), ("red", "green (dark)"), ("re", "green")),
    Case(
        "`ebnf`, not recursive",
        ebnf_spec('root ::= "a" [0-9]+ tail?\ntail ::= "." [a-z]'),
        ("a1", "a12.x"),
        ("a", "a1."),
    ),
    Case("`ebnf`, recursive", ebnf_spec('root ::= "(" root ")" | "x"'), ("x", "((x))"), ("(x", "()")),
    Case(
        "`structural_tag`, short form",
        structural_tag_spec(SHORT_TAG),
        ("hi", 'so <f>{"a": 1}</f> end'),
        ("a <f>{}</f>", "<f>"),
    ),
    Case(
        "`structural_tag`, long form",
        structural_tag_spec(LONG_TAG),
        ("x=12<t>any \n</t>", "x=ab<t></t>"),
        ("x=<t></t>", "x=1<t>"),
    ),
    Case("JSON object", json_schema_spec({"type": "object"}), ("{}", '{"a": [1, "b"]}'), ("[]", "1", '{"a":1}')),
    schema("`type`", {"type": ["integer", "null"]}, ("1", "-7", "null"), ("1.5", '"a"', "01")),
    schema("`enum`, `const`", {"enum": ["a", 2, None, {"k": [1]}]}, ('"a"', "2", "null", '{"k": [1]}'), ('"b"', "3")),
    schema(
        "`minimum`, `maximum`, exclusive",
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 120},
        ("-5", "119"),
        ("-6", "120"),
    ),
    schema(
        "… for fractions",
        {"type": "number", "minimum": 0.5, "maximum": 2},
        ("0.5", "1.75", "2"),
        ("0.49", "2.01", "1e3"),
    ),
    schema("`multipleOf`, integers", {"type": "integer", "multipleOf": 7}, ("14", "0"), ("15",)),
    schema("`multipleOf`, fractions", {"type": "number", "multipleOf": 0.25}, ("1.25", "3"), ("1.3",)),
    schema(
        "`minLength`, `maxLength`",
        {"type": "string", "minLength": 2, "maxLength": 3},
        ('"ab"', '"éé"'),
        ('"a"', '"abcd"', '"\\n"'),
    ),
    schema("`pattern`", {"type": "string", "pattern": '^a"?b+'}, ('"abbx"', '"a\\"b"'), ('"ba"', '"a"b"')),
    schema("`pattern` with a length", {"type": "string", "pattern": "^a+$", "maxLength": 3}, ('"aa"',), ('"aaaa"',)),
    schema(
        "`format` (date, time, email, …)",
        {"type": "string", "format": "date"},
        ('"2024-02-28"',),
        ('"2024-02-31"', '"2024"'),
    ),
    schema(
        "`items`, `minItems`, `maxItems`",
        {"type": "array", "items": INT, "minItems": 1, "maxItems": 2},
        ("[1]", "[1, 2]"),
        ("[]", "[1, 2, 3]", '["a"]'),
    ),
    schema(
        "`prefixItems`",
        {"type": "array", "prefixItems": [INT, TEXT], "items": False, "minItems": 2},
        ('[1, "a"]',),
        ("[1]", '["a", 1]', '[1, "a", 1]'),
    ),
    schema("`uniqueItems`", {"type": "array", "items": INT, "uniqueItems": True}, ("[1, 2]",), ("[1, 1]",)),
    schema("`contains`", {"type": "array", "contains": INT}, ("[1]",), ('["a"]',)),
    schema(
        "`properties`, `required`",
        {"type": "object", "properties": {"a": INT, "b": TEXT}, "required": ["b"]},
        ('{"b": "x"}', '{"a": 1, "b": "x"}'),
        ('{"a": 1}', '{"b": 1}', '{"b": "x", "c": 1}'),
    ),
    schema(
        "`additionalProperties`", {"type": "object", "additionalProperties": INT}, ('{"x": 1}', "{}"), ('{"x": "y"}',)
    ),
    schema(
        "… beside `properties`",
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": INT},
        ('{"a": "x"}',),
        ('{"a": "x", "a": 1}', '{"a": "x", "b": "y"}'),
    ),
    schema(
        "`patternProperties`",
        {"type": "object", "patternProperties": {"^x_": INT}, "additionalProperties": False},
        ('{"x_a": 1}',),
        ('{"x_a": "b"}', '{"y": 1}'),
    ),
    schema(
        "`propertyNames`", {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, ('{"ab": 1}',), ('{"A": 1}',)
    ),
    schema(
        "`minProperties`, `maxProperties`",
        {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 2},
        ('{"a": 1}',),
        ("{}", '{"a": 1, "b": 1, "c": 1}'),
    ),
    schema("`anyOf`", {"anyOf": [INT, {"type": "boolean"}]}, ("1", "true"), ("null",)),
    schema(
        "`oneOf`, branches that exclude each other",
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": k}, "v": t}, "required": ["k", "v"]}
                for k, t in (("i", INT), ("t", TEXT))
            ]
        },
        ('{"k": "i", "v": 1}', '{"k": "t", "v": "x"}'),
        ('{"k": "i", "v": "x"}',),
    ),
    schema("`oneOf`, others", {"oneOf": [{"minimum": 2}, {"maximum": 5}]}, ("1",), ("3",)),
    schema(
        "`allOf`, `$ref` with siblings",
        {
            "allOf": [
                {"type": "object", "properties": {"a": INT}, "required": ["a"]},
                {"properties": {"b": {"$ref": "#/$defs/t", "minLength": 1}}, "required": ["b"]},
            ],
            "$defs": {"t": TEXT},
        },
        ('{"a": 1, "b": "x"}',),
        ('{"a": 1}', '{"a": 1, "b": ""}'),
    ),
    schema("recursive `$ref`", NODE, ('{"next": null}', '{"next": {"next": null}}'), ('{"next": 1}',)),
    schema("`not`", {"type": "string", "not": {"minLength": 3}}, ('"ab"',), ('"abc"',)),
    schema("`if`, `then`, `else`", {"if": {"type": "integer"}, "then": {"minimum": 3}}, ("4",), ("1",)),
    schema(
        "`dependentRequired`",
        {"type": "object", "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}},
        ('{"b": 1}',),
        ('{"a": 1}',),
    ),
    schema(
        "`unevaluatedProperties`",
        {"type": "object", "properties": {"a": INT}, "unevaluatedProperties": False},
        ('{"a": 1}',),
        ('{"b": 1}',),
    ),
]
