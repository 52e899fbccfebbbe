"""Forced text in the tokens that the tokenizer itself would make of it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from bough.constrained.spelling import LONGEST, spell

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
    [last] = encode('{"')
    assert spelt(spell(encode, PIECES.__getitem__, last, b'name"', False)) == [b'{"', b"name"]  # the quote may join


def test_nothing_is_held_back_at_the_end() -> None:
    [last] = encode('{"')
    assert spelt(spell(encode, PIECES.__getitem__, last, b'name": "', True)) == [b'{"', b"name", b'":', b' "']


def test_the_token_that_stands_is_replaced_where_both_join() -> None:
    found = spell(encode, PIECES.__getitem__, ord("{"), b'"name":', True)
    assert spelt(found) == [b'{"', b"name", b'":']


def test_what_the_model_spelt_its_own_way_stays() -> None:
    cut_short = PIECES.index(b"\xc3")
    assert spell(encode, PIECES.__getitem__, cut_short, b": 1", True) == (cut_short, *encode(": 1"))
    odd = {"n": [ord("N")]}  # the tokenizer would have made another token of it
    found = spell(lambda text: odd.get(text) or encode(text), PIECES.__getitem__, ord("n"), b"ame", True)
    assert found == (ord("n"), *encode("ame"))


def test_without_a_token_before_it_the_forced_text_is_spelt_alone() -> None:
    assert spell(encode, PIECES.__getitem__, None, b"name", True) == tuple(encode("name"))


def test_of_a_long_text_only_the_beginning_is_spelt() -> None:
    """All requests of an engine wait meanwhile; the rest follows with later tokens."""
    text, seen = '{"name": "abc"}' * LONGEST, list[int]()

    def noted(given: str) -> list[int]:
        seen.append(len(given))
        return encode(given)

    for last in (None, ord("{")):
        found = spell(noted, PIECES.__getitem__, last, text.encode(), False)
        written = b"".join(spelt(found)).decode()
        assert ("" if last is None else "{") + text == written + text[len(written) - (last is not None) :]
        assert LONGEST - 16 < len(written) <= LONGEST and list(found) == encode(written)
    assert max(seen) <= 2 * LONGEST


def test_a_character_that_is_only_begun_waits() -> None:
    assert spell(encode, PIECES.__getitem__, None, "xé".encode()[:-1], True) == (ord("x"),)


def test_a_tokenizer_that_adds_a_blank_is_left_alone() -> None:
    found = spell(lambda text: encode(" " + text), PIECES.__getitem__, ord("{"), b"name", True)
    assert found == (ord("{"),)


TEXTS = st.text(' ":{}abcnme', max_size=8)


@settings(deadline=None)
@given(before=st.text(' ":{}abcnme', min_size=1, max_size=8), forced=TEXTS, after=TEXTS)
def test_the_result_is_a_prefix_of_what_the_tokenizer_makes(before: str, forced: str, after: str) -> None:
    last = encode(before)[-1]
    found = list(spell(encode, PIECES.__getitem__, last, forced.encode(), False))
    text = PIECES[last].decode() + forced
    assert text.encode().startswith(b"".join(spelt(found)))
    if found != [last]:
        assert encode(text + after)[: len(found)] == found
