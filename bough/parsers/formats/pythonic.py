"""`[name(key="value"), other(n=1)]`: calls in Python's syntax, as Llama 4 and LFM2 write them.

A value is passed on when it is complete, because Python's spelling of it is not JSON's.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from bough.parsers.calls import Calls, NamedArguments, read_blocks
from bough.parsers.source import SPACE, MalformedError, Markers, Source, Steps
from bough.parsers.values import to_json

NAME = re.compile(r"[\w.\-]*")
JSON_WORDS = {"true": True, "false": False, "null": None}
OPEN, CLOSE = "([{", ")]}"


class Pythonic:
    """A list of calls: anywhere, or, in models that mark it, only behind `opening`."""

    shape = None

    def __init__(self, opening: str, closing: str, *, marked: bool) -> None:
        self._opening = opening
        self._markers = Markers(opening, before=SPACE) if marked else Markers("[", opening, before=SPACE)
        self._closing = closing

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, self._markers, self._list)

    def _list(self, source: Source, calls: Calls, marker: str) -> Steps[None]:
        if marker == self._opening:
            yield from source.skip_space()
            yield from source.expect("[")
        while True:
            yield from source.skip_space()
            yield from _call(source, calls)
            source.mark()
            yield from source.skip_space()
            if not (yield from source.skip(",")):
                break
        yield from source.skip_end("]")
        if marker == self._opening:
            yield from source.skip_space()
            yield from source.skip_end(self._closing)


def _call(source: Source, calls: Calls) -> Steps[None]:
    name = yield from source.word(NAME)
    yield from source.expect("(")
    yield calls.begin(name)
    arguments = NamedArguments(calls)
    yield from source.skip_space()
    while not (yield from source.skip(")")):
        key = yield from source.word(NAME)
        yield from source.skip_space()
        yield from source.expect("=")
        text = yield from _expression(source)
        yield arguments.value(key, _value_of(text))
        if (yield from source.skip(",")):
            yield from source.skip_space()
    yield arguments.end()
    yield calls.end()


def _expression(source: Source) -> Steps[str]:
    """The text up to the comma or bracket that ends it, which stays."""
    depth = 0
    quote = ""
    escaped = False
    pieces: list[str] = []
    while True:
        for at in range(source.at, len(source.text)):
            character = source.text[at]
            if quote:
                if escaped:
                    escaped = False
                elif character == "\\":
                    escaped = True
                elif character == quote:
                    quote = ""
            elif character in "'\"":
                quote = character
            elif not depth and character in ",)":
                pieces.append(source.take(at))
                return "".join(pieces).strip()
            else:
                depth += (character in OPEN) - (character in CLOSE)
        pieces.append(source.take(len(source.text)))
        yield from source.more()


def _value_of(text: str) -> Any:
    if text in JSON_WORDS:
        return JSON_WORDS[text]
    try:
        with warnings.catch_warnings(action="ignore"):  # a backslash that begins no escape is just a backslash
            value = ast.literal_eval(text)
        to_json(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise MalformedError("no value") from None
    return value


LLAMA4 = Pythonic("<|python_start|>", "<|python_end|>", marked=False)
LFM2 = Pythonic("<|tool_call_start|>", "<|tool_call_end|>", marked=True)
