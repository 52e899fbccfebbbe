"""Forced text in the tokens that the tokenizer itself would make of it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from bough.constrained.retokenise import NOTHING, Seam, retokenise

PIECES = [
    *(bytes([i]) for i in range(128)),
    b'{"',
    b"name",
    b'":',
    b' "',
    b"na",
    b"ab",
    b"abc",
    b" a",
    b'"}',
    b"\xc3",
    b"\xa9",
]
LONGEST_FIRST = sorted(range(len(PIECES)), key=lambda token: -len(PIECES[token]))


def encode(text: str) -> list[int]:
    """The longest token first: what a tokenizer does, as far as seams go."""
    data, found = text.encode(), []
    while data:
        token = next(token for token in LONGEST_FIRST if data.startswith(PIECES[token]))
        found.append(token)
        data = data[len(PIECES[token]) :]
    return found


def spelt(tokens: Sequence[int]) -> list[bytes]:
    return [PIECES[token] for token in tokens]


def test_forced_text_is_appended_but_for_what_may_join() -> None:
    seam = retokenise(encode, PIECES.__getitem__, encode('{"'), b'name"')
    assert seam.cut == 0 and spelt(seam.tokens) == [b"name"]  # the quote may join with what follows


def test_nothing_is_held_back_at_the_end() -> None:
    seam = retokenise(encode, PIECES.__getitem__, encode('{"'), b'name": "', final=True)
    assert spelt(seam.tokens) == [b"name", b'":', b' "']


def test_a_token_that_stands_is_replaced_only_if_it_may_be() -> None:
    tail = encode("{")
    assert retokenise(encode, PIECES.__getitem__, tail, b'"name":', final=True) == NOTHING
    seam = retokenise(encode, PIECES.__getitem__, tail, b'"name":', final=True, max_cut=1)
    assert seam.cut == 1 and spelt(seam.tokens) == [b'{"', b"name", b'":']


def test_what_the_model_spelt_its_own_way_stays() -> None:
    tail = [ord("n"), ord("a")]  # the tokenizer would have made one token of it
    seam = retokenise(encode, PIECES.__getitem__, tail, b": 1", final=True, max_cut=1)
    assert seam == Seam(0, tuple(encode(": 1")))


def test_a_character_that_is_only_begun_waits() -> None:
    assert retokenise(encode, PIECES.__getitem__, [], "xé".encode()[:-1], final=True).tokens == (ord("x"),)


def test_a_tokenizer_that_adds_a_blank_is_left_alone() -> None:
    assert retokenise(lambda text: encode(" " + text), PIECES.__getitem__, encode("{"), b"name", final=True) == NOTHING


TEXTS = st.text(' ":{}abcnme', max_size=8)


@settings(deadline=None)
@given(before=TEXTS, forced=TEXTS, after=st.text(' ":{}abcnme', min_size=1, max_size=3))
def test_the_result_is_a_prefix_of_what_the_tokenizer_makes(before: str, forced: str, after: str) -> None:
    tail = encode(before)
    seam = retokenise(encode, PIECES.__getitem__, tail, forced.encode(), max_cut=1)
    kept = tail[: len(tail) - seam.cut]
    result = [*kept, *seam.tokens]
    whole = b"".join(spelt(encode(before + forced)))
    assert whole.startswith(b"".join(spelt(result)))
    if seam != NOTHING and len(tail) <= 4:
        assert encode(before + forced + after)[: len(result)] == result
