"""Which patterns and grammars can be read in many ways at once, and who follows them."""

from __future__ import annotations

import numpy as np
import pytest

from bough.constrained.interface import GrammarSpec
from bough.constrained.prepare import prepare
from bough.core.errors import RequestError
from tests.constrained.walks import BYTES, allowed_tokens, matcher_of
from tests.fakes.grammar_specs import choice_spec, ebnf_spec, json_schema_spec, regex_spec, structural_tag_spec

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


@pytest.mark.parametrize("spec", ORDINARY, ids=lambda spec: spec.text[:30])
def test_what_one_character_decides_stays_with_its_back_end(spec: GrammarSpec) -> None:
    assert prepare(spec, "xgrammar").backend == "xgrammar"


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
