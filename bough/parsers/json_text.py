"""JSON while it is being written. NaN and infinities are no JSON here."""

import re

from bough.parsers.source import MalformedError, Show, Source, Steps

MAX_DEPTH = 100  # brackets that may be open at once; recursive readers cope with as many

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a string without a meaning of their own
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
SCALAR_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]*")
HEX = "0123456789abcdefABCDEF"


def json_value(source: Source, show: Show | None = None) -> Steps[str]:
    """The JSON that comes next: with `show` passed on as it comes, else given back when it is complete."""
    steps, begin, pieces = _value(source, 0), source.at, []
    waits, failure = True, None
    while waits:
        try:
            waits = next(steps, False) is None
        except MalformedError as error:
            waits, failure = False, error
        piece = source.text[begin : source.at]
        if show is None:
            pieces.append(piece)
        elif piece:
            yield show(piece)
        if failure is not None:
            raise failure
        if waits:
            yield None
            begin = source.at if source.closed else 0  # more text has come in the place of what was used
    return "".join(pieces)


def _value(source: Source, depth: int) -> Steps[None]:
    yield from source.skip_space()
    first = yield from source.peek()
    if first == '"':
        yield from _string(source)
    elif first in ("{", "[") and depth < MAX_DEPTH:
        yield from _container(source, first, depth + 1)
    elif not SCALAR.fullmatch((yield from source.word(SCALAR_CHARACTERS))):
        raise MalformedError("no JSON")


def _container(source: Source, opening: str, depth: int) -> Steps[None]:
    closing = "}" if opening == "{" else "]"
    yield from source.expect(opening)
    yield from source.skip_space()
    if (yield from source.skip(closing)):
        return
    while True:
        if opening == "{":
            yield from source.skip_space()
            yield from _string(source)
            yield from source.expect_after_space(":")
        yield from _value(source, depth)
        yield from source.skip_space()
        if (yield from _one_of(source, "," + closing)) == closing:
            return


def _string(source: Source) -> Steps[None]:
    yield from source.expect('"')
    while True:
        yield from source.word(PLAIN)
        if (yield from _one_of(source, '"\\')) == '"':
            return
        if (yield from _one_of(source, '"\\/bfnrtu')) == "u":
            for _ in range(4):
                yield from _one_of(source, HEX)


def _one_of(source: Source, allowed: str) -> Steps[str]:
    character = yield from source.peek()
    if not character or character not in allowed:
        raise MalformedError("no JSON")
    return source.take(source.at + 1)
