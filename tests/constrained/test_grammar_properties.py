"""Random regular expressions and random grammars: whatever a random sampler says under the masks matches."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.constrained.recogniser import recognises
from tests.constrained.walks import BACKEND_NAMES, accepts, matcher_of, random_text
from tests.fakes.grammar_specs import ebnf_spec, json_schema_spec, regex_spec

pytestmark = pytest.mark.parametrize("backend", BACKEND_NAMES)
QUICK = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))

ATOMS = st.sampled_from(["a", "b", "é", "[a-c]", "[^a-c]", "\\d", ".", '"', "\\\\", "x", "\\.", "\\n", "/", " "])
QUANTIFIERS = st.sampled_from(["?", "*", "+", "{0,2}", "{1,3}", "{2}", "{1,}"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: f"(?:{a}|{b})", inner, inner),
        st.builds(lambda a, q: f"(?:{a}){q}", inner, QUANTIFIERS),
    ),
    max_leaves=8,
)


@QUICK
@given(pattern=PATTERNS, seed=st.integers(0, 1000), strings=st.lists(st.text('abcx1"\\\n é.', max_size=5), max_size=8))
def test_regexes(backend: str, pattern: str, seed: int, strings: list[str]) -> None:
    matcher = matcher_of(regex_spec(pattern), backend)
    for text in strings:
        assert accepts(matcher, text) == (re.fullmatch(pattern, text, re.ASCII) is not None), text
    said = random_text(matcher, random.Random(seed), most=60, eager=0.7)
    if said is not None:
        assert re.fullmatch(pattern, said.decode(), re.ASCII), said


@QUICK
@given(pattern=PATTERNS, seed=st.integers(0, 1000))
def test_patterns_of_strings(backend: str, pattern: str, seed: int) -> None:
    matcher = matcher_of(json_schema_spec({"type": "string", "pattern": f"^(?:{pattern})$"}), backend)
    said = random_text(matcher, random.Random(seed), most=60, eager=0.7)
    if said is not None:
        assert re.fullmatch(pattern, json.loads(said), re.ASCII), said


NAMES = ("root", "one", "two")
SYMBOLS = st.sampled_from(['"a"', '"bc"', "[a-c]", "[^a-y]", '"é\\""', "one", "two", '"("', '")"', '"\\n"'])
PARTS = st.builds(lambda s, q: s + q, SYMBOLS, st.sampled_from(["", "", "", "?", "*", "+", "{1,2}"]))
ROWS = st.lists(PARTS, min_size=1, max_size=3).map(" ".join)
RULES = st.lists(ROWS, min_size=1, max_size=3).map(" | ".join)


@QUICK
@given(bodies=st.tuples(RULES, RULES, RULES), seed=st.integers(0, 1000))
def test_grammars(backend: str, bodies: tuple[str, str, str], seed: int) -> None:
    leaf = ' | "z"'  # every rule has a way to end
    grammar = "\n".join(f"{name} ::= {body}{leaf}" for name, body in zip(NAMES, bodies, strict=True))
    matcher = matcher_of(ebnf_spec(grammar), backend)
    said = random_text(matcher, random.Random(seed), most=40, eager=0.7)
    if said is not None:
        assert recognises(grammar, said.decode()), said
