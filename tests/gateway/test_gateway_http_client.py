"""The gateway's HTTP client over real sockets: which connections it keeps, what it sends again, what ends when."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bough.gateway import http_client
from bough.gateway.http_client import HttpClient, Origin, StaleConnectionError
from tests.fakes.certificates import make_certificate
from tests.fakes.gateways import until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Play = Callable[[int, asyncio.StreamWriter], Awaitable[None]]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """On the event loop that the gateway runs on, and on the plain one."""
    found: Run = request.param
    return found


@dataclass
class Server:
    """Reads requests and has `play` answer them, each with its number."""

    play: Play
    requests: list[tuple[int, bytes, bytes]] = field(default_factory=list)  # connection, head, body
    gone: int = 0
    connections: int = 0
    origin: Origin = field(init=False)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                told = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(told[0].partition(b":")[2])) if told else b""
                self.requests.append((number, head, body))
                await self.play(len(self.requests), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone += 1
        finally:
            writer.close()

    async def ask(self, client: HttpClient, method: str = "GET", target: bytes = b"/x", body: bytes = b"") -> bytes:
        with closing(await client.request(self.origin, method, target, (), body)) as answer:
            return await answer.read()


async def fine(number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)


@asynccontextmanager
async def serving(
    play: Play = fine, tls: ssl.SSLContext | None = None, path: Path | None = None
) -> AsyncIterator[tuple[HttpClient, Server]]:
    client, server = HttpClient(), Server(play)
    if path is not None:
        listening = await asyncio.start_unix_server(server.handle, path)
        server.origin = Origin("local", 0, socket_path=str(path))
    else:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=tls)
        port = listening.sockets[0].getsockname()[1]
        server.origin = Origin.of(f"{'https' if tls else 'http'}://localhost:{port}")
    try:
        yield client, server
    finally:
        client.close()
        listening.close()


def test_a_connection_is_kept_for_the_next_request(run: Run) -> None:
    async def play() -> None:
        async with serving() as (client, server):
            for _ in range(3):
                assert await server.ask(client, "POST", b"/a?b=%20", b"body") == b"ok"
            assert [number for number, _, _ in server.requests] == [0, 0, 0]
            _, head, body = server.requests[0]
            name = server.origin.name
            assert head == b"POST /a?b=%20 HTTP/1.1\r\nHost: " + name + b"\r\nContent-Length: 4\r\n\r\n"
            assert body == b"body"

    run(play())


def test_requests_at_once_have_connections_of_their_own_and_those_are_shared_later(run: Run) -> None:
    async def play() -> None:
        async def after_a_while(number: int, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.01)
            writer.write(OK)

        async with serving(after_a_while) as (client, server):
            for _ in range(2):
                await asyncio.gather(*(server.ask(client) for _ in range(4)))
            assert server.connections == 4 and len(server.requests) == 8

    run(play())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b"more than was asked for",
    ],
)
def test_a_connection_that_cannot_be_trusted_is_not_kept(run: Run, answer: bytes) -> None:
    async def play() -> None:
        async def write(number: int, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)

        async with serving(write) as (client, server):
            assert await server.ask(client) == await server.ask(client) == b"ok"
            assert server.connections == 2

    run(play())


def test_a_connection_that_the_server_has_closed_is_not_taken(run: Run) -> None:
    async def play() -> None:
        async def once(number: int, writer: asyncio.StreamWriter) -> None:
            writer.write(OK)
            await writer.drain()
            writer.close()

        async with serving(once) as (client, server):
            await server.ask(client, "POST")
            (kept,) = client._idle[server.origin]
            await until(lambda: not kept.is_usable(time.monotonic()))  # its goodbye arrives
            assert await server.ask(client, "POST") == b"ok"

    run(play())


def test_only_what_may_be_sent_twice_is_sent_again_over_another_connection(run: Run) -> None:
    async def play() -> None:
        async def hang_up(number: int, writer: asyncio.StreamWriter) -> None:
            if number in (2, 5):  # as one that closes just when the request comes
                writer.close()
            else:
                writer.write(OK)

        async with serving(hang_up) as (client, server):
            await server.ask(client)
            assert await server.ask(client, "GET") == b"ok"
            assert len(server.requests) == 3
            await server.ask(client)
            with pytest.raises(StaleConnectionError):
                await server.ask(client, "POST", body=b"once")
            assert len(server.requests) == 5

    run(play())


def test_a_fresh_connection_that_breaks_is_a_fault_for_every_method(run: Run) -> None:
    async def play() -> None:
        async def hang_up(number: int, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with serving(hang_up) as (client, server):
            with pytest.raises(ConnectionError, match="closed"):
                await server.ask(client, "GET")
            assert len(server.requests) == 1

    run(play())


def test_whoever_leaves_early_closes_the_connection(run: Run) -> None:
    async def play() -> None:
        async def endless(number: int, writer: asyncio.StreamWriter) -> None:
            if number == 1:
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
            await asyncio.sleep(0)

        async with serving(endless) as (client, server):
            answer = await client.request(server.origin, "POST", b"/x", (), b"{}")
            assert await answer.read_some() == b"abc"
            answer.close()
            await until(lambda: server.gone == 1)
            waiting = asyncio.ensure_future(server.ask(client))
            await until(lambda: len(server.requests) == 2)
            waiting.cancel()
            await until(lambda: server.gone == 2)

    run(play())


@pytest.mark.parametrize("size", [10, 30 << 20])
def test_an_answer_that_comes_before_the_body_was_sent_is_read_though_a_reset_follows(run: Run, size: int) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def play() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            origin = Origin("127.0.0.1", server.sockets[0].getsockname()[1])
            with closing(HttpClient()) as client:
                answer = await client.request(origin, "POST", b"/x", (), b"x" * size)
                with closing(answer):
                    assert (answer.status, await answer.read()) == (413, b"no")

    run(play())


def test_connections_that_nobody_uses_are_closed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "IDLE_S", 0.05)

    async def play() -> None:
        async with serving() as (client, server):
            await asyncio.gather(server.ask(client), server.ask(client))
            await until(lambda: server.gone == 2)
            assert await server.ask(client) == b"ok"

    run(play())


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "CONNECT_TIMEOUT_S", 0.05)

    async def play() -> None:
        async def never(*_: object, **__: object) -> None:
            await asyncio.sleep(3600)

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
        with pytest.raises(ConnectionError, match="reached in time") as caught:
            await HttpClient().request(Origin.of("http://somewhere:1"), "GET", b"/", (), b"")
        assert not isinstance(caught.value, TimeoutError)  # that one is an attempt's whose time is up

    asyncio.run(play())  # uvloop's methods cannot be replaced


def test_nobody_listening_is_told_as_such(run: Run) -> None:
    async def play() -> None:
        async with serving() as (client, server):
            gone = server.origin
        with pytest.raises(ConnectionRefusedError):
            await client.request(gone, "GET", b"/", (), b"")

    run(play())


def test_a_large_body_arrives_whole(run: Run) -> None:
    async def play() -> None:
        body = bytes(range(256)) * 40_000

        async def echo(number: int, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        async with serving(echo) as (client, server):
            assert await server.ask(client, "POST", body=body) == body
            assert server.requests[0][2] == body

    run(play())


def test_a_header_cannot_smuggle_another_request(run: Run) -> None:
    async def play() -> None:
        async with serving() as (client, server):
            for value in (b"1\r\n\r\nGET /", b"1\n", b"1\r", b"\r1", b"\n\r", b"1\r\n"):
                for headers in ([(b"x", value)], [(b"x", value), (b"y", b"2")], [(value, b"x")]):
                    with pytest.raises(ConnectionError, match="line break"):
                        await client.request(server.origin, "GET", b"/", headers, b"")
            assert not server.connections

    run(play())


def test_unix_sockets_and_tls(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def over_unix() -> None:
        async with serving(path=tmp_path / "s") as (client, server):
            assert await server.ask(client) == await server.ask(client) == b"ok"
            assert server.connections == 1

    run(over_unix())
    cert, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def over_tls() -> bytes:
        async with serving(tls=context) as (client, server):
            return await server.ask(client, "POST", body=b"x" * 100_000)

    with pytest.raises(ssl.SSLCertVerificationError):
        run(over_tls())
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert run(over_tls()) == b"ok"


@pytest.mark.parametrize(
    ("url", "host", "port", "name", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, b"127.0.0.1:8000", b""),
        ("https://api.example.com/base", "api.example.com", 443, b"api.example.com", b"/base"),
        ("http://[::1]:80", "::1", 80, b"[::1]:80", b""),
        ("http://b\u00fccher.example", "xn--bcher-kva.example", 80, b"xn--bcher-kva.example", b""),
    ],
)
def test_origins_of_urls(url: str, host: str, port: int, name: bytes, prefix: bytes) -> None:
    origin = Origin.of(url)
    assert (origin.host, origin.port, origin.name, origin.prefix) == (host, port, name, prefix)
