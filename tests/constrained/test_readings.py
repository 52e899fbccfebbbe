"""Which patterns and grammars can be read in many ways at once, or force endless text, and what is done then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bough.constrained.compiler import CachingCompiler
from bough.constrained.interface import GrammarSpec
from bough.constrained.prepare import prepare
from bough.core.errors import RequestError
from tests.constrained.walks import BYTES, allowed_tokens, matcher_of
from tests.fakes.grammar_specs import choice_spec, ebnf_spec, json_schema_spec, regex_spec, structural_tag_spec

WORDS = [f"word number {i}" for i in range(200)]
NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
        "right": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
        "more": {"type": "array", "items": {"$ref": "#/$defs/n"}},
    },
    "required": ["value", "left", "right", "more"],
}
ORDINARY = [
    regex_spec(r"[a-z]+@[a-z]+\.com"),
    regex_spec(r"\d{3}-\d{4}"),
    regex_spec(r"(yes|yellow|no)"),
    regex_spec(r"([a-z]+, )*end\."),
    regex_spec(r"(\d+\.\d+|\d+)"),
    regex_spec(r".*x.*"),
    regex_spec(r"(a{1,3};){2,5}"),
    regex_spec(r"[a-z]{1,8}: \d{2,}"),
    choice_spec(["red", "rot", "redder"]),
    json_schema_spec({"type": "object"}),
    json_schema_spec({"type": "string", "pattern": "^[a-z]{2,8}$"}),
    json_schema_spec({"type": "object", "properties": {"s": {"type": "string", "pattern": r"^(\w+\s?)*\.$"}}}),
    ebnf_spec('root ::= "(" root ")" | [a-z]'),
    ebnf_spec('root ::= item ("," item)*\nitem ::= [a-z]+'),
    ebnf_spec('root ::= "x" | "a" root b\nb ::= "' + "b" * 200 + '"'),
    json_schema_spec({"$ref": "#/$defs/n", "$defs": {"n": NODE}}),
    json_schema_spec({"type": "array", "items": {"type": "integer"}, "minItems": 1_000}),
    json_schema_spec({"type": "object", "properties": {word: {"type": "string"} for word in WORDS}, "required": WORDS}),
    structural_tag_spec(
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
            "triggers": ["<f"],
        }
    ),
]
AMBIGUOUS = [
    regex_spec(r".*a{1,20}"),
    regex_spec(r"(aa|[^a]+)[a-z]{0,30}a"),
    regex_spec(r"(\w+\s?)*\."),
    regex_spec(r"([ -~]+ ?){1,20}"),
    regex_spec(r"(.{1,10}){1,10}"),
    regex_spec(r"([a-z]*[a-z]*)*z"),
    regex_spec(r"(a?){30}a{30}"),
    regex_spec(r"(x+x+)+y"),
    regex_spec(r"(.*a){1,18}.{300}b"),
    json_schema_spec({"type": "string", "maxLength": 1000}),  # not ambiguous, but large
    ebnf_spec('root ::= root root | "a" | "b"'),
    ebnf_spec('root ::= [a-z ]* root [a-z ]* | "x"'),
    ebnf_spec(
        "root ::= a a a a a a a a\na ::= b b b b b b b b | [^x]\nb ::= c c c c c c c c | [^y]\n"
        "c ::= [a-z]* [^z] [a-z]* | root"
    ),
    structural_tag_spec({"type": "structural_tag", "format": {"type": "regex", "pattern": r"(\w+\s?)*\."}}),
]


def doubling(last: str) -> str:
    """Rules whose text is twice as long with each."""
    return "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + f"r60 ::= {last}"


def lists_of(times: int, depth: int, inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": times, "items": lists_of(times, depth - 1, inner)} if depth else inner


def tag(**given: Any) -> GrammarSpec:
    return structural_tag_spec({"type": "structural_tag", "format": given})


CONST = {"const": "x"}
DOUBLED = {f"d{i}": lists_of(2, 1, {"$ref": f"#/$defs/d{i + 1}"}) for i in range(40)} | {"d40": CONST}
LONG_TAG = {"type": "tag", "begin": "a" * 1000, "content": {"type": "const_string", "value": "x"}, "end": "x"}
MANY_LISTS = {"type": "object", "properties": {"a": lists_of(1000, 3, CONST)}, "required": ["a"]}
ENDLESS = [
    ebnf_spec(f"root ::= r0\n{doubling('[a]')}"),
    ebnf_spec(f'root ::= "x" | "y" r0\n{doubling("[ab] | root")}'),
    ebnf_spec('root ::= "x" | "a" root b\nb ::= "' + "b" * 5000 + '"'),
    json_schema_spec(lists_of(10_000, 2, CONST)),
    json_schema_spec({"anyOf": [{"type": "null"}, lists_of(1000, 3, CONST)]}),
    json_schema_spec({"$defs": DOUBLED, "$ref": "#/$defs/d0"}),
    tag(type="grammar", grammar=f"root ::= r0\n{doubling('[a]')}"),
    tag(type="json_schema", json_schema=lists_of(1000, 3, CONST)),
    tag(type="repeat", content=LONG_TAG, min=10_000, max=10_000),
    tag(type="sequence", elements=[{"type": "optional", "content": LONG_TAG}] * 200),
]


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def compiler(request: pytest.FixtureRequest) -> Iterator[CachingCompiler]:
    built = CachingCompiler(request.param, lambda: BYTES, timeout_s=60.0)
    yield built
    built.close()


@pytest.mark.parametrize("spec", ENDLESS, ids=lambda spec: spec.text[:30])
def test_endless_text_without_a_choice_is_not_listed(spec: GrammarSpec, compiler: CachingCompiler) -> None:
    """A back end would list all of it, until the engine has no memory left. It is followed a token at a time."""
    ticket = compiler.request(spec)
    while not ticket.done:
        time.sleep(0.002)
    matcher = ticket.result().matcher()
    assert not matcher.jumps
    for _ in range(20):
        matcher.fill(mask := np.zeros(BYTES.mask_words, np.int32))
        assert matcher.forced() == b"" and matcher.accept(int(allowed_tokens(mask).max()))
        if matcher.finished:
            break


def test_a_schema_that_only_xgrammar_reads_is_measured_too() -> None:
    styled = tag(type="json_schema", json_schema=MANY_LISTS, style="qwen_xml")
    assert not prepare(styled, "xgrammar").jumps


@pytest.mark.parametrize("spec", ORDINARY, ids=lambda spec: spec.text[:30])
def test_what_one_character_decides_stays_with_its_back_end(spec: GrammarSpec) -> None:
    prepared = prepare(spec, "xgrammar")
    assert prepared.backend == "xgrammar" and prepared.jumps


@pytest.mark.parametrize("spec", AMBIGUOUS, ids=lambda spec: spec.text[:30])
def test_what_can_be_read_in_many_ways_goes_where_masks_are_bounded(spec: GrammarSpec) -> None:
    assert prepare(spec, "xgrammar").backend == "llguidance"
    assert prepare(spec, "llguidance").backend == "llguidance"


@pytest.mark.parametrize("spec", AMBIGUOUS, ids=lambda spec: spec.text[:30])
def test_masks_of_ambiguous_grammars_come_or_are_refused(spec: GrammarSpec) -> None:
    """Not one of them takes without end, which is what a hanging test would show."""
    matcher = matcher_of(spec, "xgrammar")
    mask = np.zeros(BYTES.mask_words, np.int32)
    try:
        for byte in b"the quick brown fox jumps over the lazy dog":
            matcher.fill(mask)
            allowed = set(allowed_tokens(mask).tolist())
            chosen = byte if byte in allowed else min(allowed)
            assert matcher.accept(chosen)
            if matcher.finished:
                break
    except RequestError as error:
        assert "cannot be followed" in str(error)
