"""A worker's response is read alike, however its bytes are cut and framed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.gateway.upstream_response import (
    LARGEST_HEAD,
    READ_BUFFER,
    ProtocolError,
    UpstreamResponse,
)


@dataclass
class Flow:
    """A transport that notes when it is slowed down."""

    paused: bool = False
    closing: bool = False

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    def is_closing(self) -> bool:
        return self.closing


def response(flow: Flow | None = None, *, to_head: bool = False) -> UpstreamResponse:
    loop = cast(asyncio.AbstractEventLoop, asyncio._get_running_loop())  # only those that wait need one
    return UpstreamResponse(cast(asyncio.Transport, flow or Flow()), loop, to_head=to_head, on_close=lambda _: None)


async def head_of(coming: UpstreamResponse) -> None:
    while not coming.status:
        await coming.more()


@dataclass(frozen=True)
class Sent:
    """What a server writes, and what it means."""

    raw: bytes
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    ends_with_connection: bool
    keeps: bool


NAMES = st.sampled_from([b"X-A", b"x-b", b"Content-Type", b"SERVER"])
VALUES = st.text("abc/; =\u00e9", max_size=12).map(lambda text: text.strip().encode("latin-1"))


@st.composite
def answers(draw: st.DrawFn) -> Sent:
    status = draw(st.sampled_from([200, 201, 400, 429, 503]))
    headers = draw(st.lists(st.tuples(NAMES, VALUES), max_size=4))
    pieces = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=5))
    framing = draw(st.sampled_from(["length", "chunked", "connection"]))
    closes = draw(st.booleans())
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nX-Hint: 1\r\n\r\n"]))
    body = b"".join(pieces)
    told = list(headers)
    if closes:
        told.append((b"Connection", b"close"))
    payload = body
    if framing == "length":
        told.append((b"Content-Length", str(len(body)).encode()))
    elif framing == "chunked":
        told.append((b"Transfer-Encoding", b"chunked"))
        extension = draw(st.sampled_from([b"", b";a=1"]))
        trailers = draw(st.sampled_from([b"", b"X-Trailer: t\r\n"]))
        payload = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
        payload += b"0\r\n" + trailers + b"\r\n"
    head = b"HTTP/1.1 %d Some Words\r\n" % status + b"".join(b"%s: %s\r\n" % header for header in told) + b"\r\n"
    expected = [(name.lower(), value) for name, value in told]
    by_connection = framing == "connection"
    return Sent(interim + head + payload, status, expected, body, by_connection, not closes and not by_connection)


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    marks = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[start:end] for start, end in pairwise(marks) if end > start]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)


@given(answers(), PLACES, st.booleans())
@settings(deadline=None)
def test_any_cutting_gives_the_same_answer(sent: Sent, places: list[int], reads_along: bool) -> None:
    async def play() -> None:
        coming = response()
        reading = asyncio.ensure_future(read(coming)) if reads_along else None
        for piece in cut(sent.raw, places):
            coming.feed(piece)
            await asyncio.sleep(0)
        if sent.ends_with_connection:
            assert not coming.complete
            coming.lost(None)
        assert coming.complete and coming.reusable is sent.keeps
        status, body = await (reading or asyncio.ensure_future(read(coming)))
        assert (status, body) == (sent.status, sent.body)
        assert coming.headers == sent.headers
        assert coming.ends_with_connection is sent.ends_with_connection

    asyncio.run(play())


async def read(coming: UpstreamResponse) -> tuple[int, bytes]:
    await head_of(coming)
    return coming.status, await coming.read()


@given(answers(), PLACES, st.integers(0, 10_000))
@settings(deadline=None)
def test_an_answer_that_breaks_off_is_never_taken_for_whole(sent: Sent, places: list[int], end: int) -> None:
    async def play() -> None:
        raw = sent.raw[: end % len(sent.raw)]
        coming = response()
        for piece in cut(raw, places):
            coming.feed(piece)
        coming.lost(ConnectionResetError("reset"))
        assert not coming.reusable
        got = b""
        with pytest.raises(ConnectionError, match="reset"):
            await head_of(coming)
            while piece := await coming.read_some():
                got += piece
        assert sent.body.startswith(got)  # what came before the end was still read

    asyncio.run(play())


@given(st.binary(max_size=200), PLACES)
@settings(deadline=None)
def test_no_bytes_upset_it(raw: bytes, places: list[int]) -> None:
    coming = response()
    for piece in cut(raw, places):
        coming.feed(piece)
    coming.lost(None)
    assert not coming.reusable


def test_garbage_is_a_fault() -> None:
    async def play() -> None:
        for raw in (b"SMTP ready\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", b"\x16\x03\x01\x02"):
            coming = response()
            coming.feed(raw)
            with pytest.raises(ProtocolError):
                await head_of(coming)
        statuses = [b"HTTP/1.1 %03d Odd\r\nContent-Length: 0\r\n\r\n" % status for status in (0, 99, 600, 999)]
        for raw in (
            b"HTTP/1.1 200 OK\r\nX: " + b"y" * LARGEST_HEAD,
            b"HTTP/1.1 101 Up\r\nUpgrade: x\r\n\r\nhello",
            *statuses,
        ):
            coming = response()
            coming.feed(raw)
            with pytest.raises(ProtocolError):
                await head_of(coming)

    asyncio.run(play())


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body(status: int) -> None:
    coming = response()
    coming.feed(b"HTTP/1.1 %d X\r\n\r\n" % status)
    assert coming.complete and coming.reusable
    to_head = response(to_head=True)
    to_head.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n")
    assert to_head.complete and not to_head.reusable


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno", b"HTT", b"\x00"])
@pytest.mark.parametrize("at_once", [True, False])
def test_what_nobody_asked_for_spoils_the_connection_and_not_the_answer(more: bytes, at_once: bool) -> None:
    async def play() -> None:
        coming = response()
        raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        for piece in [raw + more] if at_once else [raw, more]:
            coming.feed(piece)
        assert await coming.read() == b"ok"
        assert coming.complete and not coming.reusable

    asyncio.run(play())


def test_a_reader_that_is_called_away_loses_nothing() -> None:
    async def play() -> None:
        coming = response()
        coming.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await coming.read_some()
        coming.feed(b"ab")
        assert await coming.read_some() == b"ab"
        coming.feed(b"cd")
        assert await coming.read() == b"cd" and coming.reusable

    asyncio.run(play())


def test_a_reader_that_is_slow_slows_the_worker_down() -> None:
    async def play() -> None:
        flow = Flow()
        coming = response(flow)

        def is_slowed_down() -> bool:
            return flow.paused

        coming.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (4 * READ_BUFFER))
        coming.feed(b"x" * READ_BUFFER)
        assert not is_slowed_down()
        coming.feed(b"y")
        assert is_slowed_down()
        assert await coming.read_some() == b"x" * READ_BUFFER + b"y"
        assert not is_slowed_down()
        coming.feed(b"z" * (READ_BUFFER + 1))
        coming.close()  # its connection may serve others
        assert not is_slowed_down()
        other = response(flow)
        other.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (4 * READ_BUFFER) + b"z" * (READ_BUFFER + 1))
        flow.closing = True  # whoever closes it wants no more
        assert len(await other.read_some()) == READ_BUFFER + 1 and is_slowed_down()

    asyncio.run(play())
