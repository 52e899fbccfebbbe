"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,n:[1,true]}<tool_call|>`. Strings have quotes of their own, keys
have none."""

from __future__ import annotations

import re
from typing import Any

from bough.parsers.calls import Calls, NamedArguments, read_blocks
from bough.parsers.json_text import MAX_DEPTH
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps
from bough.parsers.values import read_json

OPENING = Markers("<|tool_call>", before=SPACE)
CLOSING = "<tool_call|>"
QUOTE = '<|"|>'
STRING_END = Markers(QUOTE)
NAME_END = Markers("{")
KEY_END = Markers(":")
BARE = re.compile(r"[^,}\]<]*")  # what stands without quotes


class Gemma:
    """No grammar is made for its calls."""

    shape = None

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._call)

    def _call(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from source.skip_space()
        yield from source.expect("call:")
        name, _ = yield from source.until(NAME_END, MOST_NAME)
        yield calls.begin(name.strip())
        arguments = NamedArguments(calls)
        while (key := (yield from _next_key(source))) is not None:
            if (yield from source.skip(QUOTE)):
                yield from arguments.raw(source, key, STRING_END, is_text=True)
            else:
                yield arguments.value(key, (yield from _value(source, 1)))
        yield arguments.end()
        yield calls.end()
        source.mark()
        yield from source.skip_space()
        yield from source.skip_end(CLOSING)


def _next_key(source: Source) -> Steps[str | None]:
    """The key of the next member of an object; None at its end."""
    yield from source.skip_space()
    yield from source.skip(",")
    yield from source.skip_space()
    if (yield from source.skip("}")):
        return None
    key, _ = yield from source.until(KEY_END, MOST_NAME)
    yield from source.skip_space()
    return key.strip().removeprefix(QUOTE).removesuffix(QUOTE)


def _value(source: Source, depth: int) -> Steps[Any]:
    """A value inside of arguments, when it is complete."""
    if depth > MAX_DEPTH:
        raise MalformedError("too deep")
    if (yield from source.skip(QUOTE)):
        return (yield from source.until(STRING_END))[0]
    if (yield from source.skip("{")):
        return (yield from _object(source, depth))
    if (yield from source.skip("[")):
        return (yield from _list(source, depth))
    text = (yield from source.word(BARE)).strip()
    try:
        return read_json(text)
    except ValueError:
        if not text:
            raise MalformedError("no value") from None
        return text


def _object(source: Source, depth: int) -> Steps[dict[str, Any]]:
    members: dict[str, Any] = {}
    while (key := (yield from _next_key(source))) is not None:
        if key in members:
            raise MalformedError(f"{key!r} is given twice")
        members[key] = yield from _value(source, depth + 1)
    return members


def _list(source: Source, depth: int) -> Steps[list[Any]]:
    elements: list[Any] = []
    while True:
        yield from source.skip_space()
        if elements:
            yield from source.skip(",")
            yield from source.skip_space()
        if (yield from source.skip("]")):
            return elements
        elements.append((yield from _value(source, depth + 1)))
