"""Stop strings and regexes over chunked text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.errors import RequestError
from bough.tokenizer import stops
from bough.tokenizer.stops import StopMatcher, StopOutcome

short = st.text(alphabet="ab\n", min_size=1, max_size=5)


def run(matcher: StopMatcher, chunks: list[str]) -> tuple[str, str | None]:
    text = ""
    for chunk in chunks:
        emit, matched, _ = matcher.push(chunk)
        text += emit
        if matched is not None:
            return text, matched
    return text + matcher.flush(), None


def expected(text: str, strings: list[str], keep: bool) -> tuple[str, str | None]:
    """The plain definition: the shortest beginning of the text that ends with a stop; the longest such stop."""
    for end in range(len(text) + 1):
        endings = [stop for stop in strings if text[:end].endswith(stop)]
        if endings:
            matched = max(endings, key=len)
            return text[: end if keep else end - len(matched)], matched
    return text, None


@settings(deadline=None, max_examples=400)
@given(
    text=st.text(alphabet="ab\n", max_size=30),
    strings=st.lists(short, min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=12),
    keep=st.booleans(),
)
def test_any_chunking_finds_the_first_stop(text: str, strings: list[str], cuts: list[int], keep: bool) -> None:
    chunks = [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]
    assert run(StopMatcher(strings, (), keep), chunks) == expected(text, strings, keep)


@settings(deadline=None)
@given(text=st.text(alphabet="ab", max_size=30), strings=st.lists(short, min_size=1, max_size=3))
def test_exactly_what_may_become_a_stop_is_held(text: str, strings: list[str]) -> None:
    matcher = StopMatcher(strings, (), keep_match=False)
    emitted = ""
    for i, char in enumerate(text):
        outcome = matcher.push(char)
        emitted += outcome.emit
        if outcome.matched is not None:
            break
        so_far = text[: i + 1]
        held = max((n for s in strings for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
        assert emitted == so_far[: len(so_far) - held]


def test_text_flows_around_a_false_start() -> None:
    matcher = StopMatcher(["###END"], (), keep_match=False)
    assert matcher.push("Title ##") == StopOutcome("Title ", None)
    assert matcher.push("# Sub") == StopOutcome("### Sub", None)
    assert matcher.push(" ###EN") == StopOutcome(" ", None)
    assert matcher.push("D and more") == StopOutcome("", "###END")
    assert matcher.push("even more") == StopOutcome("", None)
    assert matcher.flush() == ""


def test_held_text_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["###END"], (), keep_match=False)
    assert matcher.push("x##").emit == "x"
    assert matcher.flush() == "##"
    assert matcher.flush() == ""


@pytest.mark.parametrize(("keep", "emit"), [(False, "a "), (True, "a 42.")])
def test_a_regex_stops_at_its_match(keep: bool, emit: str) -> None:
    assert StopMatcher((), [r"\d+\."], keep).push("a 42. b 7.") == StopOutcome(emit, r"\d+\.", "42.")


def test_a_regex_holds_back_what_may_still_match() -> None:
    matcher = StopMatcher((), [r"\d+\."], keep_match=False)
    assert matcher.push("a 4") == StopOutcome("a ", None)
    assert matcher.push("2") == StopOutcome("", None)
    assert matcher.push(" b") == StopOutcome("42 b", None)
    assert matcher.push(" 1") == StopOutcome(" ", None)
    assert matcher.push(".") == StopOutcome("", r"\d+\.", "1.")


def test_a_regex_sees_what_stands_before_the_held_text() -> None:
    matcher = StopMatcher((), ["^END", "(?<=a )stop"], keep_match=False)
    assert matcher.push("a line").emit == "a line"
    assert matcher.push("END").matched is None  # not at the beginning of the text
    assert matcher.push(" a ").emit.endswith("a ")
    assert matcher.push("stop") == StopOutcome("", "(?<=a )stop", "stop")
    long = StopMatcher((), ["^END"], keep_match=False)
    for _ in range(3):
        long.push("x" * stops.REGEX_CONTEXT)
    assert long.push("END") == StopOutcome("END", None)


def test_a_greedy_regex_cannot_hold_a_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "MAX_HELD", 10)
    matcher = StopMatcher((), [r"(?s).*x"], keep_match=False)
    emitted = "".join(matcher.push("abcde").emit for _ in range(6))
    assert emitted == "abcde" * 4
    assert matcher.push("x") == StopOutcome("", "(?s).*x", "abcdeabcdex")


def test_empty_matches_do_not_stop() -> None:
    assert StopMatcher((), ["z*"], keep_match=False).push("abc zz") == StopOutcome("abc ", "z*", "zz")


def test_strings_and_regexes_together_stop_at_the_first() -> None:
    matcher = StopMatcher(["world"], [r"o w"], keep_match=False)
    assert matcher.push("hello world") == StopOutcome("hell", "o w", "o w")
    matcher = StopMatcher(["hell"], [r"o w"], keep_match=False)
    assert matcher.push("hello world") == StopOutcome("", "hell")


def test_a_regex_that_never_ends_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "REGEX_TIMEOUT_S", 0.01)
    matcher = StopMatcher((), [r"(a|aa|a.)+(b|c)+$d"], keep_match=False)
    with pytest.raises(RequestError, match="takes too long"):
        matcher.push("a" * 60 + "e")
