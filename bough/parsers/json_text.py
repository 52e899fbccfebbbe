"""JSON while it is being written, by a parser that can pause anywhere. NaN and infinities are no JSON here."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

from bough.parsers.source import BLANKS, MalformedError, Show, Source, Steps

MAX_DEPTH = 100  # brackets that may be open at once; recursive readers cope with as many

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a string without a meaning of their own
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
SCALAR_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]*")
HEX = "0123456789abcdefABCDEF"

T = TypeVar("T")
Waiting = Generator[None, None, T]  # yields where it needs more text


class JsonValue:
    """One value. `scan` takes as much of a text as belongs to it."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False  # the character after the last one taken does not continue any JSON
        self._text, self._at = "", 0
        self._parser = self._value(0)

    def scan(self, text: str, at: int = 0) -> int:
        """Up to where a text belongs to the value: to its end, unless it is `done` or has `failed`."""
        self._text, self._at = text, at
        try:
            next(self._parser)
        except StopIteration:
            self.done = not self.failed
        except MalformedError:
            self.failed = True
        return self._at

    def _value(self, depth: int) -> Waiting[None]:
        first = yield from self._peek()
        if first == '"':
            yield from self._string()
        elif first in "{[" and depth < MAX_DEPTH:
            yield from self._container(depth + 1)
        else:
            yield from self._scalar()

    def _container(self, depth: int) -> Waiting[None]:
        opening = yield from self._take("{[")
        closing = "}" if opening == "{" else "]"
        if (yield from self._peek()) == closing:
            self._at += 1
            return
        while True:
            if opening == "{":
                yield from self._peek()
                yield from self._string()
                yield from self._peek()
                yield from self._take(":")
            yield from self._value(depth)
            yield from self._peek()
            if (yield from self._take("," + closing)) == closing:
                return

    def _string(self) -> Waiting[None]:
        yield from self._take('"')
        while True:
            self._skip(PLAIN)
            if self._at == len(self._text):
                yield
            elif (yield from self._take('"\\')) == '"':
                return
            elif (yield from self._take('"\\/bfnrtu')) == "u":
                for _ in range(4):
                    yield from self._take(HEX)

    def _scalar(self) -> Waiting[None]:
        """A number, true, false or null: it ends where something else begins, which is not taken."""
        text = self._skip(SCALAR_CHARACTERS)
        while self._at == len(self._text):
            yield
            text += self._skip(SCALAR_CHARACTERS)
        if not SCALAR.fullmatch(text):
            raise MalformedError("no JSON")

    def _peek(self) -> Waiting[str]:
        """The next character that is not blank."""
        self._skip(BLANKS)
        while self._at == len(self._text):
            yield
            self._skip(BLANKS)
        return self._text[self._at]

    def _take(self, allowed: str) -> Waiting[str]:
        while self._at == len(self._text):
            yield
        character = self._text[self._at]
        if character not in allowed:
            raise MalformedError("no JSON")
        self._at += 1
        return character

    def _skip(self, characters: re.Pattern[str]) -> str:
        found = characters.match(self._text, self._at)
        assert found is not None, "the pattern matches an empty text too"
        self._at = found.end()
        return found[0]


def json_value(source: Source, show: Show | None = None) -> Steps[str]:
    """The JSON that comes next: with `show` passed on as it comes, else given back when it is complete."""
    value, pieces = JsonValue(), []
    while True:
        piece = source.take(value.scan(source.text, source.at))
        if show is None:
            pieces.append(piece)
        elif piece:
            yield show(piece)
        if value.done:
            return "".join(pieces)
        if value.failed:
            raise MalformedError("no JSON")
        yield from source.more()
