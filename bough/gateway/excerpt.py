"""What routing needs of a large body, found without decoding it and without holding up the event loop.

A decoder goes through a body in one call, for seconds if it is made of millions of tiny values, and holds Python's lock
meanwhile, in whichever thread it runs. So a large body is searched for the few fields that routing reads, in steps that
take microseconds, with a turn for everybody else every few milliseconds. The result is a small body with those fields,
a long one cut where a value ends: routing is about beginnings.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator

import msgspec

from bough.gateway.peek import FIELDS
from bough.server.errors import HttpError

MOST_OF_FIELD = 1 << 18
WINDOW = 1 << 16  # bytes that one step looks at
STEP = 64  # what a step costs besides, in bytes
TURN = 1 << 17  # bytes of work between two turns of the event loop: a few milliseconds
MOST_STEPS = 1 << 20  # some seconds; each string, list and object is one or two
LONGEST_NAME = 100

Steps = Generator[int, None, bytes]  # yields the work of each step, in bytes

BEGINNING = re.compile(rb"[ \t\r\n]*+\{")
OUTER, INNER = re.compile(rb'["{}\[\],:]'), re.compile(rb'["{}\[\]]')
IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[{}\[\],]', re.DOTALL)
QUOTE, COMMA, COLON = b'",:'
CLOSING = {ord("{"): b"}", ord("["): b"]"}


async def excerpt_of(body: bytes) -> bytes:
    """A small body with the fields of a large one that routing reads; an empty one for what is no JSON object. Raises
    a 413 for one of more values than can be gone through."""
    steps = _excerpt(body)
    work = 0
    for _ in range(MOST_STEPS):
        try:
            work += next(steps)
        except StopIteration as end:
            excerpt: bytes = end.value
            return excerpt
        if work > TURN:
            work = 0
            await asyncio.sleep(0)
    message = "The body has too many strings, lists and objects; send fewer in one request."
    raise HttpError(413, message, "RequestTooLargeError")


def _excerpt(body: bytes) -> Steps:
    start = BEGINNING.match(body, 0, WINDOW)
    if start is None:
        return b""
    found: dict[str, tuple[int, int]] = {}
    name, value_at, string_at, at, depth = "", 0, start.end(), start.end(), 1
    while depth and at < len(body):
        mark = (OUTER if depth == 1 else INNER).search(body, at, at + WINDOW)
        yield STEP + (min(at + WINDOW, len(body)) if mark is None else mark.end()) - at
        if mark is None:
            at += WINDOW
            continue
        at = mark.end()
        sign = body[mark.start()]
        if sign == QUOTE:
            string_at = mark.start()
            at = yield from _string_end(body, at)
        elif sign == COLON:
            name, value_at = _name(body[string_at : min(mark.start(), string_at + LONGEST_NAME)]), at
        elif sign in CLOSING:
            depth += 1
        elif sign != COMMA:
            depth -= 1
        if name and (sign == COMMA or not depth):
            found[name] = value_at, mark.start()
            name = ""
    parts = []
    for name, (begin, end) in found.items():
        part = body[begin:end] if end - begin <= MOST_OF_FIELD else (yield from _cut(body, begin))
        parts.append(b'"%s":%s' % (name.encode(), part))
    return b"{%s}" % b",".join(parts)


def _string_end(body: bytes, at: int) -> Generator[int, None, int]:
    """Where the string that has begun before `at` is over."""
    while at < len(body):
        quote = body.find(b'"', at, at + WINDOW)
        end = quote if quote >= 0 else min(at + WINDOW, len(body))
        if body.find(b"\\", at, end) >= 0:  # seldom: the way before is much faster
            inside = IN_STRING.match(body, at, at + WINDOW)
            assert inside is not None
            end = inside.end()
            if end == at:  # a backslash that nothing follows
                break
        yield STEP + end - at
        at = end
        if at < len(body) and body[at] == QUOTE:
            return at + 1
    return len(body)


def _name(written: bytes) -> str:
    """A field's name, if it is one that is looked for."""
    try:
        name = msgspec.json.decode(written, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return name if name in FIELDS else ""


def _cut(body: bytes, at: int) -> Steps:
    """The beginning of a long value: as many whole values as fit, and everything that is open then closed."""
    raw = body[at : at + MOST_OF_FIELD].lstrip()
    if raw.startswith(b'"'):
        return raw[: max(1, raw.rfind(b" "))] + b'"'
    end, before, signs = 0, 0, bytearray()  # the last comma, and how many of the signs stand before it
    for token in TOKEN.finditer(raw):
        yield STEP
        sign = raw[token.start()]
        if sign == COMMA:
            end, before = token.start(), len(signs)
        elif sign != QUOTE:
            signs.append(sign)
    closing: list[bytes] = []
    for sign in signs[:before]:
        if sign in CLOSING:
            closing.append(CLOSING[sign])
        elif closing:
            closing.pop()
    return raw[:end] + b"".join(reversed(closing)) if end else b"null"
