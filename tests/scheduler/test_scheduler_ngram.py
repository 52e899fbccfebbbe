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


def test_the_last_place_of_the_longest_match_goes_on() -> None:
    known = ints([1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3])
    assert proposer().propose(known, "", 4).tolist() == [4, 9, 2, 3]  # behind 1 2 3, not behind the later 2 3


def test_of_equal_matches_the_latest_counts() -> None:
    assert proposer().propose(ints([1, 2, 7, 7, 1, 2, 8, 8, 1, 2]), "", 2).tolist() == [8, 8]


def test_a_repeated_text_goes_on_repeating() -> None:
    assert proposer().propose(ints([5, 1, 2, 3, 1, 2, 3]), "", 8).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert proposer().propose(ints([4, 4, 4]), "", 3).tolist() == [4, 4, 4]


def test_a_single_equal_token_says_nothing() -> None:
    assert not len(proposer().propose(ints([1, 2, 3, 4, 2]), "", 4))
    assert not len(proposer().propose(ints([1]), "", 4))


def test_ended_requests_are_a_corpus_of_their_namespace_only() -> None:
    guess = proposer()
    guess.learn(ints([1, 2, 3, 4, 5, 6]), "a")
    known = ints([7, 2, 3, 4])
    assert guess.propose(known, "a", 8).tolist() == [5, 6]
    assert not len(guess.propose(known, "b", 8)) and not len(guess.propose(known, "", 8))


def test_the_corpus_keeps_what_came_last() -> None:
    guess = proposer(ngram_capacity=8)
    guess.learn(ints(list(range(100, 106))), "old")
    guess.learn(ints(list(range(6))), "a")
    guess.learn(ints([10, 11, 12, 13]), "a")
    assert not len(guess.propose(ints([100, 101, 102]), "old", 2))
    assert not len(guess.propose(ints([0, 1, 2]), "a", 2))  # its beginning was cut
    assert guess.propose(ints([2, 3, 4]), "a", 2).tolist() == [5, 10]


def test_a_corpus_may_be_off() -> None:
    guess = proposer(ngram_capacity=0)
    guess.learn(ints([1, 2, 3, 4]), "")
    assert not len(guess.propose(ints([1, 2, 3]), "", 2))


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
