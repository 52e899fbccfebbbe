"""For every format: what a model writes is what comes out, however the stream is cut; what is no call is text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bough.parsers import TOOL_FORMATS, AnswerFormat, AnswerParser, CallArguments, CallBegin, CallEnd, Event, Parsed
from bough.parsers.formats.base import Framed
from tests.parsers.writers import WRITER_IDS, WRITERS, Given, llama3

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "scale": {"type": "number"},
            "detailed": {"type": "boolean"},
            "places": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object"},
        },
    },
    "search-web.v2": {"type": "object", "properties": {"query": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}
# Names that mean a format which another name has already.
ALIASES = ("glm", "qwen", "qwen25", "mimo", "step3p5", "poolside_v1", "trinity")
DISTINCT = pytest.mark.parametrize(
    ("name", "write"),
    [pytest.param(*pair, id=id) for pair, id in zip(WRITERS, WRITER_IDS, strict=True) if pair[0] not in ALIASES],
)
EVERY = pytest.mark.parametrize(("name", "write"), WRITERS, ids=WRITER_IDS)

# What would end a value early in some format, or is a lone quote to Python, is no fair text for a round trip.
WORDS = st.text(
    st.one_of(st.characters(codec="utf-8", exclude_characters="<>[]\\'\"\r"), st.sampled_from('{}:,"é😀')), max_size=12
).map(lambda text: text.strip().replace("\x85", "").replace("\x00", ""))
SCALARS = st.one_of(WORDS, st.integers(-(2**53), 2**53), st.booleans())
ARGUMENTS = {
    "get_weather": st.fixed_dictionaries(
        {},
        optional={
            "city": WORDS,
            "days": st.integers(-(2**53), 2**53),
            "scale": st.floats(allow_nan=False, allow_infinity=False),
            "detailed": st.booleans(),
            "places": st.lists(WORDS, max_size=3),
            "options": st.dictionaries(WORDS, SCALARS, max_size=2),
        },
    ),
    "search-web.v2": st.fixed_dictionaries({"query": WORDS}),
    "now": st.just({}),
}
CALLS = st.lists(
    st.sampled_from(sorted(TOOLS)).flatmap(lambda name: st.tuples(st.just(name), ARGUMENTS[name])),
    min_size=1,
    max_size=3,
)


def form_of(name: str) -> AnswerFormat:
    return AnswerFormat(tool_format=TOOL_FORMATS[name], tools=TOOLS)


def events_of(form: AnswerFormat, pieces: Sequence[str]) -> list[Event]:
    parser = AnswerParser(form)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def cut(text: str, seed: int) -> list[str]:
    """The text in pieces of random lengths, empty ones too."""
    chance = random.Random(seed)
    longest = chance.choice([1, 3, 20])
    pieces = []
    while text:
        length = chance.randint(0, longest)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def calls_in(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


@DISTINCT
@settings(deadline=None, max_examples=15)
@given(calls=CALLS, said=st.sampled_from(["", "Let me look.", "a < b [x] {y}"]), seed=st.integers(0, 2**32))
def test_what_is_written_comes_out(
    name: str, write: Callable[[Given], str], calls: Given, said: str, seed: int
) -> None:
    said = "" if write is llama3 else said  # its calls have no opening marker
    keys = [key for _, arguments in calls for key in arguments.get("options", ())]
    assume(name != "gemma4" or not any(set(key) & set("{}:,") for key in keys))  # its keys have no quotes
    text = f"{said}\n\n{write(calls)}" if said else write(calls)
    whole = form_of(name).parse(text)
    assert calls_in(whole) == list(calls)
    assert whole.text == said
    assert Parsed.of(events_of(form_of(name), cut(text, seed))) == whole


@DISTINCT
@settings(deadline=None, max_examples=15)
@given(calls=CALLS, damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 5)), max_size=4), seed=st.integers())
def test_any_chunking_of_a_damaged_stream_gives_the_same(
    name: str, write: Callable[[Given], str], calls: Given, damage: list[tuple[int, int]], seed: int
) -> None:
    text = damaged(write(calls), damage)
    form = form_of(name)
    whole = form.parse(text)
    assert Parsed.of(events_of(form, cut(text, seed))) == whole
    assert Parsed.of(events_of(form, list(text))) == whole
    assert Parsed.of(events_of(replace(form, eager=frozenset(TOOLS)), cut(text, seed))) == whole
    shown = [event for event in events_of(form, list(text)) if isinstance(event, CallBegin)]
    assert [begun.name for begun in shown] == [call.name for call in whole.calls]  # a stream begins no others
    for call in whole.calls:
        assert call.name in TOOLS
        assert isinstance(json.loads(call.arguments), dict)


def damaged(text: str, damage: list[tuple[int, int]]) -> str:
    for place, kind in damage:
        at = place % (len(text) + 1)
        if kind == 0:
            text = text[:at]
        elif kind == 1:
            text = text[:at] + text[at + 1 :]
        elif kind == 2:
            text = text[:at] + '"}]>'[place % 4] + text[at:]
        elif kind == 3:
            text = text[:at] + text
        else:
            text = text[:at] + text[at + 5 :]
    return text


@EVERY
def test_arguments_are_shown_while_they_come(name: str, write: Callable[[Given], str]) -> None:
    long = "word " * 40
    text = write([("get_weather", {"city": long.strip(), "days": 3})])
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    events = events_of(replace(form_of(name), eager=frozenset(TOOLS)), pieces)
    kinds = [type(event) for event in events]
    assert kinds[0] is CallBegin
    assert kinds[-1] is CallEnd
    shown = [event for event in events if isinstance(event, CallArguments)]
    assert len(shown) > (1 if name in ("pythonic", "lfm2") else 20)
    held = events_of(form_of(name), pieces)
    assert [type(event) for event in held] == [CallBegin, CallArguments, CallEnd]
    assert Parsed.of(held) == Parsed.of(events)


@EVERY
def test_a_call_of_no_tool_is_text(name: str, write: Callable[[Given], str]) -> None:
    text = write([("no_such_tool", {"city": "Rome"})])
    parsed = form_of(name).parse(text)
    assert not parsed.calls
    if isinstance(TOOL_FORMATS[name], Framed):  # their text is what stands in messages
        assert "Rome" in parsed.text
    else:
        assert parsed.text == text


@EVERY
def test_a_call_that_breaks_off_is_text(name: str, write: Callable[[Given], str]) -> None:
    text = write([("get_weather", {"city": "Rome", "options": {"a": 1}})])
    at = text.index("Rome") + 2
    parsed = form_of(name).parse(text[:at])
    assert (parsed.calls, parsed.text) == ([], text[:at])


@EVERY
def test_the_last_marker_may_be_cut_off(name: str, write: Callable[[Given], str]) -> None:
    """It is often a stop token, which nobody sees."""
    text = write([("now", {})])
    shorter = re.sub(r"(</?[^<]*>|\])$", "", text).rstrip()
    if name in (
        "glm",
        "glm45",
        "glm47",
        "poolside_v1",
        "minicpm5",
    ):  # without it one cannot know that no argument follows
        return
    parsed = form_of(name).parse(shorter)
    assert calls_in(parsed) == [("now", {})], shorter


def test_every_format_is_tested() -> None:
    assert {name for name, _ in WRITERS} == set(TOOL_FORMATS)
