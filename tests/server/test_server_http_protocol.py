"""HTTP/1.1 as bytes on a socket: requests in any pieces, and what becomes of bad ones and of clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.core.server_settings import ServerSettings
from bough.server import http
from bough.server.app import App
from bough.server.bodies import read_bytes
from bough.server.endpoint import Endpoint
from bough.server.http import HttpServer, open_listener
from bough.server.http_protocol import (
    EXCHANGE_KEY,
    LEAST_BODY,
    MOST_HEADERS,
    MOST_PIPELINED,
    WHOLE_KEY,
    Exchange,
    HttpProtocol,
)

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Open = Callable[[], Awaitable[Client]]
POST = b"POST /a%20b?c=d HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
LAST = b"Connection: close\r\n"
CLOSE = b"connection: close\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the method, the path, the query, and the body."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    answer = f"{scope['method']} {scope['path']} {scope['query_string'].decode()} ".encode() + body
    headers = [(b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def counting(scope: Scope, receive: Receive, send: Send) -> None:
    """A stream of three pieces."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"1", b"2", b"3"):
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


@contextlib.asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[Open]:
    async with serving(app) as (_, connect):
        yield connect


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[tuple[HttpServer, Open]]:
    settings = ServerSettings(port=0)
    listener = open_listener(settings)
    port = listener.getsockname()[1]
    server = HttpServer(app, listener, settings)
    running = asyncio.create_task(server.run_here())
    try:
        yield server, lambda: asyncio.open_connection("127.0.0.1", port)
    finally:
        server.leave(0)
        await running


def answers(app: ASGIApp, *pieces: bytes) -> bytes:
    """All that comes until the server closes the connection."""

    async def play() -> bytes:
        async with served(app) as connect, asyncio.timeout(30):
            reader, writer = await connect()
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002 if len(pieces) > 1 else 0)
            raw = await reader.read()
            writer.close()
            return raw

    return asyncio.run(play())


def body_of(raw: bytes) -> bytes:
    assert raw.startswith(b"HTTP/1.1 200 OK\r\n"), raw
    return raw.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("size", [1000, 7, 1])
def test_a_request_may_come_in_any_pieces(size: int) -> None:
    raw = POST.replace(b"Host", LAST + b"Host")
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    assert body_of(answers(echo, *pieces)) == b"POST /a b c=d hello"


def test_a_body_may_come_in_chunks_and_what_follows_them_is_no_header() -> None:
    seen: list[Scope] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await echo(scope, receive, send)

    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + LAST + b"\r\n"
    raw = answers(noting, head, b"3\r\nhel\r\n2\r\nlo\r\n0\r\nX-Late: 1\r\n\r\n")
    assert body_of(raw) == b"POST /  hello"
    assert b"x-late" not in dict(seen[0]["headers"])


def test_requests_behind_each_other_are_answered_in_order() -> None:
    second = b"GET /second HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n"
    raw = answers(echo, POST + POST + second)
    assert raw.count(b"HTTP/1.1 200 OK") == 3 and raw.count(b"POST /a b c=d hello") == 2
    assert raw.endswith(b"GET /second  ")


def test_a_stream_is_chunked_and_to_an_old_client_it_ends_with_the_connection() -> None:
    new = answers(counting, b"GET / HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n")
    assert body_of(new) == b"1\r\n1\r\n1\r\n2\r\n1\r\n3\r\n0\r\n\r\n" and b"transfer-encoding: chunked" in new
    old = answers(counting, b"GET / HTTP/1.0\r\n\r\n")
    assert body_of(old) == b"123" and b"chunked" not in old


def test_head_gets_the_head_alone() -> None:
    raw = answers(echo, b"HEAD / HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n")
    assert body_of(raw) == b"" and b"content-length: 8" in raw


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304)])
def test_a_length_that_is_not_known_is_not_called_none(method: bytes, status: int) -> None:
    async def empty(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [], WHOLE_KEY: b""})

    raw = answers(empty, method + b" / HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n")
    assert b"content-length" not in raw and b"chunked" not in raw and raw.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("value", [b"1\r\nx: 2", b"1\n", b"1\r", b"\n1", b"1\r\n"])
def test_a_header_with_a_line_break_is_not_sent(value: bytes) -> None:
    async def splits(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", value)], WHOLE_KEY: b"body"})

    raw = answers(splits, b"GET / HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n")
    assert raw.startswith(b"HTTP/1.1 500 ") and b"a: " not in raw.replace(b"content-", b"")


@pytest.mark.parametrize("target", [b"http://x", b"http://x/", b"/"])
def test_a_target_may_have_a_host(target: bytes) -> None:
    assert body_of(answers(echo, b"GET %b?a=b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (target, LAST))) == b"GET / a=b "


def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n" + LAST + b"\r\n"
    interim, _, raw = answers(echo, head, b"hello").partition(b"\r\n\r\n")
    assert interim == b"HTTP/1.1 100 Continue" and body_of(raw) == b"POST /  hello"


ASKS = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\nContent-Length: 5\r\n"


def test_a_client_that_asks_first_is_told_once() -> None:
    raw = answers(echo, ASKS + LAST + b"\r\n", *(bytes([each]) for each in b"hello"))
    assert raw.count(b"100 Continue") == 1 and raw.endswith(b"POST /  hello")


def test_a_client_that_is_not_told_to_send_its_body_may_not_send_another_request_in_its_place() -> None:
    raw = answers(App([], ServerSettings()), ASKS + b"\r\n")
    assert raw.startswith(b"HTTP/1.1 404 ") and CLOSE in raw and raw.count(b"HTTP/1.1") == 1


def test_a_wish_for_another_protocol_is_passed_over() -> None:
    wish = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    raw = answers(echo, b"GET / HTTP/1.1\r\nHost: x\r\n" + wish + b"\r\n")
    assert body_of(raw) == b"GET /  " and b"connection: close" in raw
    for framing, body in (
        (b"Content-Length: 5\r\n", b"hello"),
        (b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n0\r\n\r\n"),
    ):
        post = b"POST /a HTTP/1.1\r\nHost: x\r\n" + wish + framing + b"\r\n" + body  # as Java's client sends it
        raw = answers(echo, post + post + POST.replace(b"Host", LAST + b"Host"))
        assert raw.count(b"POST /a  hello") == 2 and raw.endswith(b"POST /a b c=d hello")
        assert (
            body_of(answers(echo, *(bytes([each]) for each in post.replace(b"Host", LAST + b"Host"))))
            == b"POST /a  hello"
        )


@pytest.mark.parametrize(
    "nonsense",
    [
        b"nonsense\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_what_is_no_request_is_refused(nonsense: bytes) -> None:
    assert answers(echo, nonsense).startswith(b"HTTP/1.1 400 Bad Request\r\n")


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
ENDLESS = {
    "a path": b"GET /",
    "a header": HEAD + b"X: ",
    "headers": HEAD,
    "short headers": HEAD + b"A:\r\n" * (MOST_HEADERS + 1),
    "what follows a body": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n",
}


@pytest.mark.parametrize("beginning", ENDLESS.values(), ids=ENDLESS)
def test_what_surrounds_a_body_has_an_end(beginning: bytes) -> None:
    more = b"X-More: some\r\n" if beginning.endswith(b"\r\n") else b"x"
    pieces = [more * (10_000 // len(more))] * 80

    async def play() -> bytes:
        async with served(echo) as connect, asyncio.timeout(30):
            reader, writer = await connect()
            writer.write(beginning)
            with contextlib.suppress(ConnectionError):  # it is closed before all is sent
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                return await reader.read()
            return b""

    raw = asyncio.run(play())
    assert raw.startswith(b"HTTP/1.1 431 ") and raw.endswith(b"send less.\n")


def test_a_head_that_comes_byte_by_byte_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 1)

    async def play() -> bytes:
        async with served(echo) as connect, asyncio.timeout(30):
            reader, writer = await connect()
            reading = asyncio.create_task(reader.read())
            with contextlib.suppress(ConnectionError):
                writer.write(HEAD + b"X: ")
                while not reading.done():
                    writer.write(b"x")
                    await asyncio.sleep(0.05)
                return await reading
            return b""

    assert asyncio.run(play()) == b""


# ---- responses that do not wait for the body

EARLY = App([Endpoint("/a", lambda request: sized(request), "its length")], ServerSettings(api_key="k", max_body_mb=1))
LONG = b"x" * (8 << 20)
CHUNKED = b"".join(b"%x\r\n%b\r\n" % (1 << 16, LONG[: 1 << 16]) for _ in range(128)) + b"0\r\n\r\n"


def sent_first(app: ASGIApp, raw: bytes, loop: Callable[[], asyncio.AbstractEventLoop]) -> bytes:
    """What a client finds that reads nothing before it has sent all, as many libraries do."""

    def client(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(raw)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    async def play() -> bytes:
        async with served(app) as connect, asyncio.timeout(60):
            _, writer = await connect()
            return await asyncio.to_thread(client, writer.get_extra_info("peername"))

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(play())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    ("target", "key", "status"),
    [(b"/nothing", b"", b"404"), (b"/a", b"", b"401"), (b"/a", b"X-Api-Key: k\r\n", b"413")],
)
def test_a_client_that_sends_all_before_it_reads_finds_its_early_response(
    target: bytes, key: bytes, status: bytes, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    for framing, body in (
        (b"Content-Length: %d\r\n" % len(LONG), LONG),
        (b"Transfer-Encoding: chunked\r\n", CHUNKED),
    ):
        head = b"POST %b HTTP/1.1\r\nHost: x\r\n" % target + key + framing
        raw = sent_first(EARLY, head + LAST + b"\r\n" + body, loop)
        assert raw.startswith(b"HTTP/1.1 " + status) and raw.count(b"HTTP/1.1") == 1
        # The connection is good for another request.
        raw = sent_first(EARLY, head + b"\r\n" + body + b"GET /other HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n", loop)
        assert raw.startswith(b"HTTP/1.1 " + status) and raw.count(b"HTTP/1.1") == 2 and b"no /other here" in raw


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_sends_all_before_it_reads_finds_its_refusal(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    raw = sent_first(echo, HEAD + b"X: " + LONG, loop)
    assert raw.startswith(b"HTTP/1.1 431 ") and raw.endswith(b"send less.\n")
    raw = sent_first(echo, HEAD + b"Transfer-Encoding: chunked\r\n\r\nno size" + LONG, loop)
    assert raw.startswith(b"HTTP/1.1 400 ") and raw.count(b"HTTP/1.1") == 1


def test_a_client_that_leaves_within_a_body_that_nobody_wants_is_noticed() -> None:
    async def play() -> None:
        async with serving(EARLY) as (server, connect), asyncio.timeout(30):
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(LONG))
            writer.write(LONG[: 4 * LEAST_BODY])  # more than waits for an application
            await reader.readuntil(b"\r\n\r\n")
            writer.write(LONG[: 4 * LEAST_BODY])
            await asyncio.sleep(0.05)
            writer.transport.abort()
            while server.server_state.connections:
                await asyncio.sleep(0.001)

    asyncio.run(play())


@pytest.mark.parametrize("last", [b"", LAST])
def test_a_body_that_nobody_wants_is_read_for_a_while(last: bytes) -> None:
    async def play() -> bytes:
        async with serving(EARLY) as (server, connect):
            reader, writer = await connect()
            writer.write(HEAD + last + b"Transfer-Encoding: chunked\r\n\r\n")
            raw = await reader.readuntil(b"\r\n\r\n")
            began_s = clock.time()
            while server.server_state.connections and clock.time() < began_s + 1000:
                writer.write(b"1\r\nx\r\n")
                await asyncio.sleep(0.001)
                clock.ahead_s += 0.5
            assert began_s + http.KEEP_ALIVE_S - 1 < clock.time() < began_s + http.KEEP_ALIVE_S + 10
            return raw

    clock = Clock()
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        assert runner.run(play()).startswith(b"HTTP/1.1 404 ")


def test_a_body_that_goes_wrong_after_its_response_has_no_other() -> None:
    async def play() -> bytes:
        async with served(EARLY) as connect, asyncio.timeout(30):
            reader, writer = await connect()
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            raw = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"no size\r\n")
            return raw + await reader.read()

    raw = asyncio.run(play())
    assert raw.startswith(b"HTTP/1.1 404 ") and raw.count(b"HTTP/1.1") == 1


def test_a_body_that_was_not_read_is_not_kept() -> None:
    async def play() -> None:
        seen: list[Exchange] = []

        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope[EXCHANGE_KEY])
            await EARLY(scope, receive, send)

        async with served(noting) as connect, asyncio.timeout(30):
            reader, writer = await connect()
            writer.write(POST)
            await reader.readuntil(b"\r\n\r\n")
            assert seen[0].take_whole() == b""

    asyncio.run(play())


class Clock(asyncio.SelectorEventLoop):
    """Time goes on by itself, and in leaps."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def uploaded(*pieces: bytes, pause_s: float = 50.0) -> bytes:
    """What a server with its own limits answers to a body that comes with such pauses between its pieces."""
    clock, come = Clock(), [0]

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        async def noted() -> Message:
            message = await receive()
            come[0] += len(message.get("body", b""))
            return message

        await App([Endpoint("/a", sized, "its length")], ServerSettings())(scope, noted, send)

    async def play() -> bytes:
        async with served(noting) as connect:
            reader, writer = await connect()
            reading = asyncio.create_task(reader.read())
            size = sum(map(len, pieces))
            writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (LAST, size))
            sent = 0
            for piece in pieces:
                writer.write(piece)
                sent += len(piece)
                while come[0] < sent and not reading.done():
                    await asyncio.sleep(0.001)
                if reading.done():
                    break
                clock.ahead_s += pause_s
                await asyncio.sleep(0.01)  # in which nothing comes
            raw = await reading
            writer.close()
            return raw

    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        return runner.run(play())


async def sized(request: Request) -> Response:
    return Response(f"{len(await read_bytes(request))} bytes")


@pytest.mark.parametrize("piece", [b"x", b"x" * (LEAST_BODY // 2 - 1)])
def test_a_body_that_comes_byte_by_byte_has_its_time(piece: bytes) -> None:
    head, _, text = uploaded(*[piece] * 100).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
    assert b"64 KiB of it, or its end, must come within 60 s (--body-timeout-s)." in text


def test_a_long_upload_that_goes_on_is_taken() -> None:
    assert body_of(uploaded(*[b"x" * LEAST_BODY] * 30)) == b"%d bytes" % (30 * LEAST_BODY)


def test_a_body_that_came_while_the_process_was_stopped_is_read() -> None:
    """Its time is over when the process goes on, and then it is there."""

    async def play() -> bytes:
        async with served(echo) as connect:
            reader, writer = await connect()
            writer.write(POST[:-1].replace(b"Host", LAST + b"Host"))
            while not (waiting := [task for task in asyncio.all_tasks() if "Exchange.run" in repr(task)]):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting[0].done()
            writer.transport.write(POST[-1:])  # the server has no turn before the clock leaps
            clock.ahead_s += 500.0
            return await reader.read()

    clock = Clock()
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        assert body_of(runner.run(play())) == b"POST /a b c=d hello"


def test_an_idle_connection_is_closed_unless_a_request_waits_to_be_read() -> None:
    async def play() -> bytes:
        async with serving(echo) as (server, connect), asyncio.timeout(30):
            silent, _ = await connect()
            reader, writer = await connect()
            while len(server.server_state.connections) < 2:
                await asyncio.sleep(0.001)
            writer.transport.write(POST.replace(b"Host", LAST + b"Host"))  # the server has no turn before the next line
            for connection in list(server.server_state.connections):
                cast(HttpProtocol, connection).close_idle(0.0)
            assert await silent.read() == b""
            return await reader.read()

    assert body_of(asyncio.run(play())) == b"POST /a b c=d hello"


def test_requests_that_come_all_at_once_are_held_up_to_a_number_and_answered() -> None:
    raw = answers(echo, b"GET / HTTP/1.1\r\n\r\n" * 1000)  # which one read takes
    assert MOST_PIPELINED < raw.count(b" 200 OK\r\n") < 1000
    assert raw.count(CLOSE) == 1 and raw.partition(CLOSE)[2].endswith(b"GET /  ")


def test_nonsense_behind_a_request_costs_it_nothing() -> None:
    raw = answers(echo, POST + b"nonsense\r\n\r\n")
    assert body_of(raw) == b"POST /a b c=d hello"


@pytest.mark.parametrize("header", [(b"x", b"a\r\nb: c"), (b"x\n", b"a"), (b"content-length", b"1")])
def test_a_response_that_cannot_be_sent_is_never_half_of_another(header: tuple[bytes, bytes]) -> None:
    async def bad(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [header]})
        await send({"type": "http.response.body", "body": b"too long"})

    raw = answers(bad, POST)
    assert raw.startswith(b"HTTP/1.1 500 ") and raw.count(b"HTTP/1.1") == 1
    assert b"b: c" not in raw and b"too long" not in raw


def test_an_application_that_fails_is_a_500_or_a_broken_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("out of order")

    assert answers(failing, POST).startswith(b"HTTP/1.1 500 ")
    raw = answers(failing, b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n")
    assert body_of(raw) == b"4\r\nhalf\r\n"  # and no last chunk
    assert caplog.text.count("ValueError: out of order") == 2


def test_a_client_that_leaves_is_noticed() -> None:
    async def play() -> None:
        left: list[str] = []

        async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
            scope[EXCHANGE_KEY].on_leave = lambda: left.append("called")
            await receive()
            left.append((await receive())["type"])

        async with served(waiting) as connect, asyncio.timeout(30):
            _, writer = await connect()
            writer.write(POST)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            while len(left) < 2:
                await asyncio.sleep(0.01)
            assert sorted(left) == ["called", "http.disconnect"]

    asyncio.run(play())


def test_an_application_waits_for_a_client_that_reads_slowly() -> None:
    async def play() -> None:
        sent = 0

        async def flooding(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal sent
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(256):
                await send({"type": "http.response.body", "body": b"x" * (1 << 18), "more_body": True})
                sent += 1
            await send({"type": "http.response.body"})

        async with served(flooding) as connect, asyncio.timeout(60):
            reader, writer = await connect()
            writer.write(POST.replace(b"Host", LAST + b"Host"))
            await asyncio.sleep(0.5)
            assert sent < 256
            assert (await reader.read()).endswith(b"0\r\n\r\n") and sent == 256
            writer.close()

    asyncio.run(play())


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_takes_nothing_of_its_response_is_not_waited_for(reads: bool) -> None:
    async def play() -> None:
        left = asyncio.Event()

        async def flooding(scope: Scope, receive: Receive, send: Send) -> None:
            scope[EXCHANGE_KEY].on_leave = left.set
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"x" * (1 << 18), "more_body": True})

        async with serving(flooding) as (server, connect):
            reader, writer = await connect()
            writer.write(POST)
            began_s = clock.time()
            while not left.is_set() and clock.time() < began_s + 8 * http.KEEP_ALIVE_S:
                await asyncio.sleep(0.02)
                clock.ahead_s += http.KEEP_ALIVE_S / 4
                if reads:
                    await reader.readexactly(4 << 20)
            assert left.is_set() is not reads
            assert reads or not server.server_state.connections
            writer.transport.abort()

    clock = Clock()
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        runner.run(play())


def test_a_response_that_is_complete_waits_no_longer_for_a_client_that_takes_nothing() -> None:
    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [], WHOLE_KEY: LONG * 4})

    async def play() -> None:
        async with serving(whole) as (server, connect):
            _, writer = await connect()
            writer.write(POST)
            began_s = clock.time()
            await asyncio.sleep(0.1)
            while server.server_state.connections and clock.time() < began_s + 8 * http.KEEP_ALIVE_S:
                await asyncio.sleep(0.02)
                clock.ahead_s += http.KEEP_ALIVE_S / 4
            assert not server.server_state.connections
            writer.transport.abort()

    clock = Clock()
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        runner.run(play())
