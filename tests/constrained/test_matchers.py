"""What every matcher promises, in every back end: masks say what is accepted, steps can be taken back."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from bough.constrained.interface import GrammarSpec
from tests.constrained.walks import BACKEND_NAMES, BYTES, STOP, accepts, allowed_tokens, matcher_of, random_text
from tests.fakes.grammar_specs import choice_spec, json_schema_spec, regex_spec

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {}}},
    "required": ["name", "age"],
}
SPECS = [
    regex_spec("(ab|a[0-9]+)?c"),
    choice_spec(["a", "ab", "b"]),
    json_schema_spec(PERSON),
    json_schema_spec({"type": "object"}),
    regex_spec("é+[^x]y"),
]
pytestmark = pytest.mark.parametrize("backend", BACKEND_NAMES)


def filled(matcher: Any) -> set[int]:
    mask = np.full(BYTES.mask_words, -1, np.int32)
    matcher.fill(mask)
    return {int(token) for token in allowed_tokens(mask)}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_masks_allow_exactly_what_is_accepted(backend: str, spec: GrammarSpec) -> None:
    rng = random.Random(7)
    matcher = matcher_of(spec, backend)
    for _ in range(40):
        allowed = filled(matcher)
        assert allowed and max(allowed) < BYTES.size and BYTES.size - 1 not in allowed
        assert (STOP in allowed) == matcher.can_end
        for token in range(BYTES.size):
            accepted = matcher.accept(token)
            assert accepted == (token in allowed), (token, BYTES.pieces[token])
            if accepted:
                matcher.rollback(1)
        assert filled(matcher) == allowed
        following = sorted(allowed - {STOP})
        if not following:
            break
        matcher.accept(rng.choice(following))


def test_after_the_end_only_the_stop_token_is_left(backend: str) -> None:
    matcher = matcher_of(regex_spec("ab?"), backend)
    assert not matcher.accept(STOP)
    assert matcher.accept(ord("a")) and matcher.can_end and matcher.accept(STOP)
    assert matcher.finished and not matcher.can_end and matcher.forced() == b""
    assert filled(matcher) == {STOP} and not matcher.accept(ord("b"))
    matcher.rollback(1)
    assert not matcher.finished and matcher.accept(ord("b"))
    matcher.rollback(2)
    assert filled(matcher) == {ord("a"), BYTES.pieces.index(b"ab")}


def test_forced_text_is_what_must_come(backend: str) -> None:
    matcher = matcher_of(json_schema_spec(PERSON), backend)
    assert matcher.forced() == b'{"name": "'
    for byte in b'{"name": "':
        assert matcher.accept(byte)
    assert matcher.forced() == b""
    for byte in b'x", ':
        assert matcher.accept(byte)
    assert matcher.forced() == b'"age": '


def test_where_the_text_may_end_nothing_is_forced(backend: str) -> None:
    matcher = matcher_of(regex_spec("a(bc)?"), backend)
    assert matcher.forced() == b"a"
    matcher.accept(ord("a"))
    assert matcher.can_end and matcher.forced() == b""


def test_half_a_character_is_forced_at_most_whole(backend: str) -> None:
    matcher = matcher_of(regex_spec("x[éê]y"), backend)
    assert matcher.forced() in (b"x", b"x\xc3")


def test_spacing_is_fixed_unless_it_is_freed(backend: str) -> None:
    fixed, free = (matcher_of(json_schema_spec(PERSON, any_whitespace=free), backend) for free in (False, True))
    assert accepts(fixed, '{"name": "x", "age": 1}') and accepts(free, '{"name": "x", "age": 1}')
    for text in ('{"name":"x","age":1}', '{"name": "x",  "age": 1}', '{\n  "name": "x",\n  "age": 1\n}'):
        assert not accepts(fixed, text)
        assert accepts(free, text)


def test_random_objects_are_json_objects(backend: str) -> None:
    rng = random.Random(3)
    texts = [random_text(matcher_of(json_schema_spec({"type": "object"}), backend), rng) for _ in range(30)]
    ended = [text for text in texts if text is not None]
    assert len(ended) > 10
    assert all(isinstance(json.loads(text), dict) for text in ended)
