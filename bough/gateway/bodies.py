"""The room for clients' bodies at the gateway, and the search of large ones for what routing needs."""

import asyncio
import re
from collections.abc import Generator

import msgspec

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.peek import FIELDS, MEDIA_MARK, MOST_INSIDE, media_hash
from bough.server.errors import HttpError
from bough.server.held_bodies import BodyRoom

SHARE = 2  # bodies of the largest size that fit, unless the settings say otherwise


class Bodies(BodyRoom):
    def __init__(self, settings: GatewaySettings) -> None:
        room, closed = settings.max_bodies_mb or SHARE * settings.max_body_mb, {"Connection": "close"}
        super().__init__(settings.max_body_mb, room, "gateway", closed)  # the rest of a refused body is not read
        self._turn = asyncio.Lock()  # large bodies are looked into one after the other

    async def excerpt(self, body: bytes) -> bytes:
        async with self._turn:
            return await excerpt_of(body)


# ---- what routing needs of a large body

MOST_OF_FIELD, INSIDE_FIELD = 1 << 18, MOST_INSIDE // 8  # bytes, and lists and objects
WINDOW = 1 << 16  # bytes that one step looks at
STEP = 64  # what a step costs besides, in bytes
TURN = 1 << 17  # bytes of work between two turns of the event loop: a few milliseconds
MOST_STEPS = 1 << 20  # some seconds; each string, list and object is one or two
LONGEST_NAME = 100

Steps = Generator[int, None, bytes]  # yields the work of each step, in bytes

NO_OBJECT = b"!"
BEGINNING, ENDING = re.compile(rb"[ \t\r\n]*+\{"), re.compile(rb"[ \t\r\n]*+\Z")
OUTER, INNER = re.compile(rb'["{}\[\],:]'), re.compile(rb'["{}\[\]]')
IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[{}\[\],]', re.DOTALL)
# The beginning of a file in base64, in a data URL or bare; words are shorter.
FILE = re.compile(rb'"(?:data:[^,"]{0,100},)?[\w+/\-]{64}')
LONG_FILE = 1 << 10
QUOTE, COMMA, COLON = b'",:'
CLOSING = {ord("{"): b"}", ord("["): b"]"}


async def excerpt_of(body: bytes) -> bytes:
    """A small body with only the fields that routing reads; no JSON for what is no JSON object, as far as its brackets
    tell. A decoder would block the event loop for seconds on millions of tiny values, so the body is searched in steps.
    Raises a 413 for too many values."""
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
        return NO_OBJECT
    found: dict[str, tuple[int, int]] = {}
    files: list[tuple[int, int]] = []
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
            if at - string_at > LONG_FILE and FILE.match(body, string_at) is not None:
                files.append((string_at, at))
        elif sign == COLON:
            name, value_at = _name(body[string_at : min(mark.start(), string_at + LONGEST_NAME)]), at
        elif sign in CLOSING:
            depth += 1
        elif sign != COMMA:
            depth -= 1
        if name and (sign == COMMA or not depth):
            found[name] = value_at, mark.start()
            name = ""
    if depth or ENDING.match(body, at) is None:
        return NO_OBJECT
    parts = []
    for name, (begin, end) in found.items():
        inside = [file for file in files if begin <= file[0] < end]
        part = yield from (_with_digests(body, begin, end, inside) if inside else _cut(body, begin, end))
        parts.append(b'"%s":%s' % (name.encode(), part))
    return b"{%s}" % b",".join(parts)


def _with_digests(body: bytes, begin: int, end: int, files: list[tuple[int, int]]) -> Steps:
    """A value with digests of the files in it, so that what follows them is not cut off."""
    pieces = []
    for start, after in files:
        digest = media_hash()
        for at in range(start + 1, after - 1, WINDOW):
            digest.update(body[at : min(at + WINDOW, after - 1)])
            yield STEP + WINDOW
        pieces += [body[begin:start], msgspec.json.encode(MEDIA_MARK + digest.hexdigest())]
        begin = after
    value = b"".join([*pieces, body[begin:end]])
    return (yield from _cut(value, 0, len(value)))


def _string_end(body: bytes, at: int) -> Generator[int, None, int]:
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
    try:
        name = msgspec.json.decode(written, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return name if name in FIELDS else ""


def _cut(body: bytes, begin: int, end: int) -> Steps:
    """A value; of a long one the beginning: as many whole values as fit, with everything open closed."""
    raw, whole = body[begin : min(end, begin + MOST_OF_FIELD)].lstrip(), end - begin <= MOST_OF_FIELD
    if raw.startswith(b'"'):
        return raw if whole else raw[: max(1, raw.rfind(b" "))] + b'"'
    comma, before, signs = 0, 0, bytearray()  # the last one, and how many of the signs stand before it
    for token in TOKEN.finditer(raw):
        yield STEP
        sign = raw[token.start()]
        if sign == COMMA:
            comma, before = token.start(), len(signs)
        elif sign != QUOTE:
            signs.append(sign)
            if len(signs) > 2 * INSIDE_FIELD:  # with the ends
                break
    else:
        if whole:
            return raw
    closing: list[bytes] = []
    for sign in signs[:before]:
        if sign in CLOSING:
            closing.append(CLOSING[sign])
        elif closing:
            closing.pop()
    return raw[:comma] + b"".join(reversed(closing)) if comma else b"null"
