"""JSON while it is being written, and values without quotes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.parsers.events import Text
from bough.parsers.json_text import MAX_DEPTH, json_value
from bough.parsers.source import MalformedError, Source, Steps, StreamParser
from bough.parsers.values import expects_text, json_of, to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(word)


def accepts(text: str) -> bool:
    """Whether a text is one value and nothing else, by the parser, a character at a time."""
    done = False

    def grammar(source: Source) -> Steps[None]:
        nonlocal done
        with contextlib.suppress(MalformedError):
            yield from json_value(source, Text)
            done = True

    parser = StreamParser(grammar)
    shown = [event for character in text + "\n" for event in parser.feed(character)]  # the last ends a number
    used = sum(len(event.text) for event in shown if isinstance(event, Text))
    return done and not text[used:].strip(" \t\r\n")


@settings(deadline=None, max_examples=200)
@given(value=VALUES, at=st.integers(0, 60), change=st.sampled_from(["", '"', "}", "]", ",", "1", "\\", "x", "\n"]))
def test_the_parser_agrees_with_the_json_module(value: Any, at: int, change: str) -> None:
    text = json.dumps(value, ensure_ascii=bool(at % 2))
    assert accepts(text)
    damaged = text[:at] + change + text[at + 1 :]
    assert accepts(damaged) == is_json(damaged), damaged


@pytest.mark.parametrize(
    "text", ["01", "1.", "-", "+1", "1e", "tru", "nul", "[1,]", "{,}", '{"a" 1}', '"\\x"', "NaN", ""]
)
def test_what_is_no_json(text: str) -> None:
    assert not accepts(text)


def test_a_nest_that_nobody_could_read_is_no_json() -> None:
    assert accepts("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not accepts("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


@pytest.mark.parametrize(
    ("text", "schema", "meant"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, 5.5),
        ("five", {"type": "integer"}, "five"),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("12", {"type": ["string", "null"]}, "12"),
        ("12", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 12),
        ("red", {"enum": ["red", "green"]}, "red"),
        ('["a"]', {"type": "array"}, ["a"]),
        ("12", None, 12),
        ("twelve", None, "twelve"),
        ("NaN", None, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("x", {"type": 7, "anyOf": "?"}, "x"),
    ],
)
def test_values_are_what_the_schema_says(text: str, schema: Any, meant: Any) -> None:
    assert json.loads(json_of(text, schema)) == meant


def test_only_a_plain_string_is_shown_as_it_comes() -> None:
    assert expects_text({"type": "string"})
    assert expects_text({"enum": ["a", "b"]})
    assert not expects_text({"type": ["string", "null"]})
    assert not expects_text(None)


def test_half_a_surrogate_pair_can_be_sent() -> None:
    assert to_json("\ud800é").encode() == b'"\\ud800\\u00e9"'
