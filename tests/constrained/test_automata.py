"""Automata against Python's own matcher: patterns, what is made of them, and numbers by their digits."""

from __future__ import annotations

import re
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from bough.constrained import charsets
from bough.constrained.automata import Dfa, deterministic, matches, signatures
from bough.constrained.numbers import Range, decimal, whole
from bough.constrained.pattern_tree import Chars, Meet, Node, Repeat, pattern_text
from bough.constrained.regexes import parse_regex
from tests.constrained.test_grammar_properties import PATTERNS
from tests.constrained.walks import accepts, matcher_of
from tests.fakes.grammar_specs import json_schema_spec

TEXTS = st.lists(st.text('abcx1"\\\n é.', max_size=5), min_size=1, max_size=8)


def fits(node: Node, text: str) -> bool:
    return re.fullmatch(pattern_text(node), text, re.DOTALL) is not None


@given(pattern=PATTERNS, texts=TEXTS)
def test_a_pattern_and_what_is_made_of_it_match_the_same_texts(pattern: str, texts: list[str]) -> None:
    tree = parse_regex(pattern)
    dfa = deterministic(tree)
    for text in texts:
        assert matches(tree, text) == walks(dfa, text) == fits(tree, text)


@given(one=PATTERNS, other=PATTERNS, most=st.integers(0, 4), texts=TEXTS)
def test_joined_patterns(one: str, other: str, most: int, texts: list[str]) -> None:
    first, second = parse_regex(one), parse_regex(other)
    dfa = deterministic(Meet((first, Repeat(Chars(charsets.ALL), 0, most)), (second,)))
    for text in texts:
        wanted = fits(first, text) and len(text) <= most and not fits(second, text)
        assert walks(dfa, text) == wanted and (dfa.accepting or not wanted)


def test_signatures_name_the_patterns_that_one_text_can_match() -> None:
    anything = Repeat(Chars(charsets.ALL), 0, None)
    found = signatures(anything, [parse_regex("a.*"), parse_regex(".*b"), parse_regex("c")])
    assert found == {frozenset(), frozenset({0}), frozenset({1}), frozenset({0, 1}), frozenset({2})}


@given(low=st.integers(-2000, 2000), width=st.integers(0, 3000), values=st.lists(st.integers(-4000, 6000), max_size=20))
def test_ranges_of_whole_numbers(low: int, width: int, values: list[int]) -> None:
    node = whole(Range(low, low + width))
    assert node is not None
    for value in (*values, low, low + width, low - 1, low + width + 1):
        assert fits(node, str(value)) == (low <= value <= low + width)


@given(
    low=st.integers(-3000, 3000), width=st.integers(1, 5000), excluded=st.tuples(st.booleans(), st.booleans()),
    values=st.lists(st.integers(-9000, 9000), max_size=20), scale=st.sampled_from([1, 10, 1000, 10**6]),
)  # fmt: skip
def test_ranges_of_decimals(low: int, width: int, excluded: tuple[bool, bool], values: list[int], scale: int) -> None:
    found = Range(low / scale, (low + width) / scale, *excluded)
    node = decimal(found)
    assert node is not None
    for value in (*values, low, low + width):
        text = f"{value / scale:.6f}"
        above = low < value or (low == value and not excluded[0])
        below = value < low + width or (value == low + width and not excluded[1])
        if not (text.startswith("-") and value == 0):
            assert fits(node, text) == (above and below), (text, found)


@given(
    step=st.sampled_from(["1", "3", "7", "10", "20", "64", "1000", "0.5", "0.25", "2.5", "0.125"]),
    low=st.integers(-500, 500), high=st.integers(1500, 100_000),
    values=st.lists(st.integers(-1000, 200_000), max_size=30),
)  # fmt: skip
def test_multiples(step: str, low: int, high: int, values: list[int]) -> None:
    """llguidance counts them: none is written that is no multiple, and every multiple in one spelling."""
    exact = Fraction(step)
    schema = {"type": "integer" if exact.denominator == 1 else "number", "multipleOf": float(step)}
    matcher = matcher_of(json_schema_spec({**schema, "minimum": low, "maximum": high}), "llguidance")
    for value in (*values, *(int(value // exact) for value in values)):
        number = value * exact if exact.denominator > 1 else Fraction(value)
        places = 0 if exact.denominator == 1 else len(step.partition(".")[2])
        spellings = {f"{float(number):.{count}f}" for count in {0, places}}
        wanted = low <= number <= high and (number / exact).denominator == 1
        right = {text for text in spellings if Fraction(text) == number}
        assert any(accepts(matcher, text) for text in right) == (wanted and bool(right)), (right, step)


def walks(dfa: Dfa, text: str) -> bool:
    state = 0
    for char in text:
        ways = [target for found, target in dfa.edges[state] if charsets.holds(found, ord(char))]
        if not ways:
            return False
        (state,) = ways
    return state in dfa.accepting
