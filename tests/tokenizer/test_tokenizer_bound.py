"""Texts that are far longer than the context: refused or cut before they are tokenised whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.errors import RequestError
from bough.tokenizer.tokenizer import PIECE, TextBound
from tests.fakes.scripted_engine import byte_level_tokenizer

PLAIN = byte_level_tokenizer()
SMALL = TextBound(100, least=1000)
LONG = "ab " * PIECE  # 196,608 tokens


def test_the_bound_is_twice_the_context_and_generous_for_small_ones() -> None:
    assert TextBound(8192).tokens == 1 << 18 and TextBound(1 << 20).tokens == 1 << 21


def test_a_text_over_the_bound_is_refused_with_both_numbers_when_the_count_has_passed_it() -> None:
    counted: list[int] = []

    def count(piece: str) -> int:
        counted.append(len(piece))
        return len(piece)

    with pytest.raises(
        RequestError, match="more than 1000 tokens is longer than the model's context length of 100"
    ) as refused:
        SMALL.apply(LONG, count)
    assert refused.value.field == "input_ids" and counted == [PIECE]


def test_a_text_that_may_be_cut_keeps_a_beginning_with_more_tokens_than_the_context() -> None:
    bounded = PLAIN.bounded(TextBound(100, cut=True, least=1000))
    ids = bounded.encode(LONG)
    assert ids == PLAIN.encode(LONG[:PIECE]) and len(ids) > 1000
    with pytest.raises(RequestError):
        bounded.encode(LONG, keep="all")
    assert len(PLAIN.encode(LONG)) == len(LONG)


def test_bytes_count_not_characters() -> None:
    bounded = PLAIN.bounded(SMALL)
    assert len(bounded.encode("a" * 4000)) == 4000  # so much at once costs little
    with pytest.raises(RequestError):
        bounded.encode("é" * 4000)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12))
def test_groups_change_nothing(texts: list[str]) -> None:
    from bough.tokenizer import tokenizer as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GROUP", 20)
        patch.setattr(module, "PIECE", 7)
        grouped = list(PLAIN.bounded(TextBound(1000)).encode_each(texts))
    assert grouped == [PLAIN.encode(text) for text in texts]
