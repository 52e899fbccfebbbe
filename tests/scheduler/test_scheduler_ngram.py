"""Drafts by n-grams: what is found, what goes on, and who may see it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bough.core.settings import SpeculativeSettings
from bough.scheduler.ngram import NgramProposer, longest_match


def ints(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def proposer(**options: int) -> NgramProposer:
    return NgramProposer(SpeculativeSettings(**{f"speculative_{name}": value for name, value in options.items()}))


def guess(by: NgramProposer, known: list[int], namespace: str = "", count: int = 4) -> list[int]:
    return by.propose(ints(known), namespace, count)[0].tolist()


def test_the_last_place_of_the_longest_match_goes_on() -> None:
    known = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]
    assert guess(proposer(), known) == [4, 9, 2, 3]  # behind 1 2 3, not behind the later 2 3
    assert proposer().propose(ints(known), "", 4)[1] == 3


def test_of_equal_matches_the_latest_counts() -> None:
    assert guess(proposer(), [1, 2, 7, 7, 1, 2, 8, 8, 1, 2], count=2) == [8, 8]


def test_a_repeated_text_goes_on_repeating() -> None:
    assert guess(proposer(), [5, 1, 2, 3, 1, 2, 3], count=8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert guess(proposer(), [4, 4, 4], count=3) == [4, 4, 4]


def test_a_single_equal_token_says_nothing() -> None:
    assert guess(proposer(), [1, 2, 3, 4, 2]) == []
    assert guess(proposer(), [1]) == []


def test_ended_requests_are_a_corpus_of_their_namespace_only() -> None:
    by = proposer()
    by.learn(ints([1, 2, 3, 4, 5, 6]), "a")
    known = [7, 2, 3, 4]
    assert guess(by, known, "a", 8) == [5, 6]
    assert guess(by, known, "b", 8) == [] == guess(by, known, "", 8)


def test_a_longer_match_elsewhere_counts_more_than_the_own() -> None:
    by = proposer()
    by.learn(ints([1, 2, 3, 4, 5, 6]), "")
    assert guess(by, [3, 4, 9, 9, 2, 3, 4], count=2) == [5, 6]
    assert guess(by, [2, 3, 4, 9, 9, 2, 3, 4], count=2) == [9, 9]  # as long: the own


def test_the_corpus_keeps_what_came_last() -> None:
    by = proposer(ngram_capacity=8)
    by.learn(ints(list(range(100, 106))), "old")
    by.learn(ints(list(range(6))), "a")
    by.learn(ints([10, 11, 12, 13]), "a")
    assert guess(by, [100, 101, 102], "old", 2) == []
    assert guess(by, [0, 1, 2], "a", 2) == []  # its beginning was cut
    assert guess(by, [2, 3, 4], "a", 2) == [5, 10]


def test_a_corpus_may_be_off() -> None:
    by = proposer(ngram_capacity=0)
    by.learn(ints([1, 2, 3, 4]), "")
    assert guess(by, [1, 2, 3], "", 2) == []


@given(
    st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 6)
)
def test_the_longest_match_is_what_a_plain_search_finds(tokens: list[int], known: list[int], depth: int) -> None:
    matched, end = longest_match(ints(tokens), ints(known), depth)
    found = (0, 0)
    for length in range(1, min(depth, len(known)) + 1):
        places = [at + length for at in range(len(tokens)) if tokens[at : at + length] == known[-length:]]
        found = (length, places[-1]) if places else found
    assert (matched, end) == found
