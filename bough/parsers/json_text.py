"""JSON as it is being written: where a value ends, and at which character a text is no JSON.

A value is passed on while it comes, so it is checked by a small automaton that keeps nothing but the brackets that are
open. It accepts what `json.loads` accepts, without NaN and infinities.
"""

from __future__ import annotations

import re

from bough.parsers.source import BLANKS, MalformedError, Show, Source, Steps

MAX_DEPTH = 100  # what everybody's recursive reader copes with

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # inside a string, what needs no look
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
NUMBER_CHARACTERS = re.compile(r"[-+.eE0-9]*")
LITERALS = {"t": "true", "f": "false", "n": "null"}
HEX = frozenset("0123456789abcdefABCDEF")


class JsonValue:
    """One value. `scan` takes as much of a text as belongs to it."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False  # the character that follows what was taken does not belong into any JSON
        self._expect = self._value  # what the next character is for
        self._open: list[str] = []  # closing brackets that are due
        self._in_key = False
        self._number = ""
        self._literal = ""  # what is still to come of it
        self._hex = 0  # digits that are still to come of an escape

    def scan(self, text: str, at: int = 0) -> int:
        """Up to where a text belongs to the value: to its end, unless it is `done` or has `failed`."""
        while at < len(text) and not self.done and not self.failed:
            at = self._expect(text, at)
        return at

    def _value(self, text: str, at: int) -> int:
        at = _skip_blanks(text, at)
        if at == len(text):
            return at
        character = text[at]
        if character == "{":
            self._open.append("}")
            self._expect = self._first_key
        elif character == "[":
            self._open.append("]")
            self._expect = self._first_element
        elif character == '"':
            self._expect = self._string
        elif character in LITERALS:
            self._literal = LITERALS[character]
            self._expect = self._rest_of_literal
            return at
        elif character in "-0123456789":
            self._number = ""
            self._expect = self._rest_of_number
            return at
        else:
            return self._fail(at)
        return self._fail(at) if len(self._open) > MAX_DEPTH else at + 1

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _first_element(self, text: str, at: int) -> int:
        at = _skip_blanks(text, at)
        if text[at : at + 1] == "]":
            return self._close(at)
        if at < len(text):
            self._expect = self._value
        return at

    def _first_key(self, text: str, at: int) -> int:
        at = _skip_blanks(text, at)
        return self._close(at) if text[at : at + 1] == "}" else self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        at = _skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            return self._fail(at)
        self._in_key = True
        self._expect = self._string
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        at = _skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._expect = self._value
        return at + 1

    def _after_value(self, text: str, at: int) -> int:
        at = _skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == self._open[-1]:
            return self._close(at)
        if text[at] != ",":
            return self._fail(at)
        self._expect = self._key if self._open[-1] == "}" else self._value
        return at + 1

    def _close(self, at: int) -> int:
        self._open.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self.done = not self._open
        self._expect = self._after_value

    def _string(self, text: str, at: int) -> int:
        found = PLAIN.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._expect = self._escape
        elif text[at] != '"':
            return self._fail(at)
        elif self._in_key:
            self._in_key = False
            self._expect = self._colon
        else:
            self._end_value()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._hex = 4
            self._expect = self._hex_digit
        elif text[at] in '"\\/bfnrt':
            self._expect = self._string
        else:
            return self._fail(at)
        return at + 1

    def _hex_digit(self, text: str, at: int) -> int:
        if text[at] not in HEX:
            return self._fail(at)
        self._hex -= 1
        if not self._hex:
            self._expect = self._string
        return at + 1

    def _rest_of_literal(self, text: str, at: int) -> int:
        if text[at] != self._literal[0]:
            return self._fail(at)
        self._literal = self._literal[1:]
        if not self._literal:
            self._end_value()
        return at + 1

    def _rest_of_number(self, text: str, at: int) -> int:
        """A number ends where something else begins, which is not used."""
        found = NUMBER_CHARACTERS.match(text, at)
        assert found is not None
        self._number += found[0]
        if found.end() < len(text):
            if not NUMBER.fullmatch(self._number):
                return self._fail(found.end())
            self._end_value()
        return found.end()


def _skip_blanks(text: str, at: int) -> int:
    found = BLANKS.match(text, at)
    assert found is not None
    return found.end()


def json_value(source: Source, show: Show) -> Steps[None]:
    """Shows the JSON that comes next, as it comes."""
    value = JsonValue()
    while True:
        end = value.scan(source.text, source.at)
        if end > source.at:
            yield show(source.take(end))
        if value.done:
            return
        if value.failed:
            raise MalformedError("no JSON")
        yield from source.more()


def json_text(source: Source) -> Steps[str]:
    """The JSON that comes next, when it is complete."""
    value, pieces = JsonValue(), []
    while True:
        pieces.append(source.take(value.scan(source.text, source.at)))
        if value.done:
            return "".join(pieces)
        if value.failed:
            raise MalformedError("no JSON")
        yield from source.more()
