"""HTTP/1.1 on one connection, for uvicorn's server: httptools (in C) parses requests, an ASGI application answers them.

What happens for each request and each piece of a stream is kept small: a head leaves with the first bytes of its body,
one timer watches a connection, and an application that knows its `Exchange` can write without awaiting.
"""

from __future__ import annotations

import asyncio
import http
import logging
import select
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from bough.server.errors import HttpError

log = logging.getLogger(__name__)

EXCHANGE_KEY = "bough.exchange"  # of the scope
HEADERS_KEY = "bough.headers"  # of the scope: by name, of a header that comes twice the first
WHOLE_KEY = "bough.body"  # of the message that starts a response: its whole body
MOST_WAITING = 1 << 16  # bytes of a body that wait for the application before the client is slowed down
LEAST_BODY = MOST_WAITING  # bytes of a body that must come within the time for it, unless it ends
MOST_HEAD = 1 << 18  # bytes that come without being of a body: request line and headers, or what follows a body
MOST_HEADERS = 1000
CR, LF, HASH = b"\r\n#"
MOST_PIPELINED = 256  # requests behind one that is being answered
BODILESS = (204, 304)
PHRASES = {status.value: status.phrase for status in http.HTTPStatus}
STATUS_LINES = {code: f"HTTP/1.1 {code} {PHRASES.get(code, '')}".encode() for code in range(100, 600)}
TEXT = b"\r\ncontent-type: text/plain\r\nconnection: close\r\n"
BAD_REQUEST = STATUS_LINES[400] + TEXT + b"content-length: 29\r\n\r\nThis is not an HTTP request.\n"
TOO_LARGE = STATUS_LINES[431] + TEXT + b"content-length: 74\r\n"
TOO_LARGE += b"\r\nThe request line and headers may have 256 KiB and 1,000 lines; send less.\n"
FAILED = [(b"content-type", b"text/plain"), (b"content-length", b"21"), (b"connection", b"close")]


class HttpProtocol(asyncio.Protocol):
    """One connection: requests one after the other. The parser calls the `on_` methods."""

    transport: asyncio.Transport
    _incoming: Exchange  # whose body arrives

    def __init__(self, config: uvicorn.Config, server_state: ServerState, body_timeout_s: float) -> None:
        self.state = server_state
        self.body_timeout_s = body_timeout_s
        self.drained: asyncio.Future[None] | None = None  # while the client does not keep up with its response
        self.takes_more = True  # it keeps up, and is there
        self._app: ASGIApp = cast(ASGIApp, config.loaded_app)
        self._keep_alive_s = config.timeout_keep_alive
        self._parser = httptools.HttpRequestParser(self)
        self._refusal = BAD_REQUEST
        self._goes_on = False  # the next headers are those of the request that is there already
        self._deaf = False  # what comes is not looked into any more
        self._discards = False  # what comes is of a request that has its response
        self._paused = False
        self._stuck: tuple[object, int] = None, 0  # what waits for the client to take a part, and how many bytes it is
        self._unused = 0  # bytes since a head was whole or a piece of a body came
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._current: Exchange | None = None  # that is answered
        self._waiting: deque[Exchange] = deque()  # that came before the one in front had its answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.loop = asyncio.get_running_loop()
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "https" if is_ssl(self.transport) else "http",
            "root_path": "",
            "server": get_local_addr(self.transport),
            "client": get_remote_addr(self.transport),
        }
        self._active_s = self.loop.time()
        self._timer = self.loop.call_later(self._keep_alive_s, self._check_idle)
        self.state.connections.add(self)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)
        self._timer.cancel()
        self._waiting.clear()
        if self._current is not None:
            self._current.leave()
        self.resume_writing()
        self.takes_more = False

    def shutdown(self) -> None:
        """The server ends: so does the connection, with its response."""
        if self._current is None:
            self.transport.close()
        else:
            self._current.keep_alive = False

    def close_idle(self, after_s: float) -> float:
        """Closes a connection that has had no request for so long; returns the time that is left to it."""
        left_s = after_s
        if self._current is None and not self.transport.is_closing():
            left_s += self._active_s - self.loop.time()
            if left_s <= 0 and (self._discards or not self.ready()):
                self.transport.close()
        return left_s

    def ready(self, event: int = select.POLLIN) -> bool:
        """Whether the kernel holds something for it. To a process that was stopped, every connection looks idle."""
        kernel = select.poll()
        kernel.register(self.transport.get_extra_info("socket").fileno(), event)
        return bool(kernel.poll(0))

    def _check_idle(self) -> None:
        """Also ends a connection whose client has taken nothing of what it must take since the last look."""
        stuck = self.drained or self.transport.is_closing(), self.transport.get_write_buffer_size()
        if all(stuck) and stuck == self._stuck and not self.ready(select.POLLOUT):
            self.transport.abort()
            return
        self._stuck, left_s = stuck, self.close_idle(self._keep_alive_s)
        after_s = self._keep_alive_s if all(stuck) else max(left_s, 1.0)
        self._timer = self.loop.call_later(after_s, self._check_idle)

    # ---- requests

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if not (self._unused or self._discards):  # a head must be whole within the time that a connection may be idle
            self._active_s = self.loop.time()
        self._unused += len(data)
        try:
            self._parser.feed_data(data)
            if self._unused > MOST_HEAD:
                self._refusal = TOO_LARGE
                self._refuse()
        except httptools.HttpParserUpgrade as wish:
            self._pass_over(data[wish.args[0] :])
        except httptools.HttpParserError:
            self._refuse()

    def _pass_over(self, data: bytes) -> None:
        """A request for another protocol is answered in this one. The parser takes what follows for the other: another
        one reads the body, if there is one."""
        known = (b"content-length", b"transfer-encoding")
        framing = [b"%b: %b\r\n" % header for header in self._incoming.scope["headers"] if header[0] in known]
        if not framing:
            self._stop_reading()
            return
        self._incoming.whole, self._goes_on, self._parser = False, True, httptools.HttpRequestParser(self)
        self.data_received(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing) + data)

    def _stop_reading(self) -> None:
        """The connection ends with the last response."""
        self._deaf = True
        last = self._waiting[-1] if self._waiting else self._current
        if last is not None:
            last.keep_alive = False

    def _refuse(self) -> None:
        if self._waiting and not self._waiting[-1].whole:
            self._waiting.pop()
        self._stop_reading()
        if self._current is None or not self._current.whole:
            if not (self._discards or (self._current is not None and self._current.started)):
                self.transport.write(self._refusal)
            self._end()

    def _end(self) -> None:
        """No response follows. What still comes is dropped for as long as a connection may be idle: to close at once
        would reset it, and a client that sends all before it reads would never see its response."""
        if self._current is not None:
            self._current.leave()
        self._deaf, self._discards, self._current, self._active_s = True, True, None, self.loop.time()
        self._waiting.clear()
        if not self.transport.is_closing():
            self.resume_reading()
            if self.transport.can_write_eof():  # TLS cannot
                self.transport.write_eof()

    def on_message_begin(self) -> None:
        if len(self._waiting) > MOST_PIPELINED:
            raise ValueError("too many requests at once: those that came are answered, and the connection closed")
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._goes_on:
            self._goes_on = False
            return
        raw_path, _, query = self._url.partition(b"?")
        if not raw_path.startswith(b"/") or HASH in self._url:  # with a host or a fragment
            url = httptools.parse_url(self._url)
            raw_path, query = url.path or b"/", url.query or b""
        path = raw_path.decode("ascii")
        version = self._parser.get_http_version()
        self._unused = 0
        headers, self._headers = self._headers, []  # what follows the body is left out
        if len(headers) > MOST_HEADERS:
            self._refusal = TOO_LARGE
            raise ValueError("too many headers")
        scope: Scope = {
            **self._scope,
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
        }
        keep_alive = version == "1.1" and self._parser.should_keep_alive()
        self._incoming = exchange = Exchange(self, scope, keep_alive)
        if self._current is None:
            self._start(exchange)
        else:
            self._waiting.append(exchange)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._unused = 0
        if self._incoming.take(body) > MOST_WAITING:
            self.pause_reading()

    def on_message_complete(self) -> None:
        self._unused = 0
        self._incoming.whole = True
        self._incoming.wake()
        if self._discards:  # it is over, and the next request has its own time
            self._discards, self._active_s = False, self.loop.time()

    def pause_reading(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and not self._waiting and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    # ---- responses

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        exchange.task = asyncio.Task(exchange.run(self._app), loop=self.loop, name="request")  # a number takes long
        self.state.tasks.add(exchange.task)

    def answered(self, exchange: Exchange) -> None:
        self._active_s = self.loop.time()
        self._current = None
        self._discards = not exchange.whole
        if exchange.keep_alive:
            if self._waiting:
                self._start(self._waiting.popleft())
            if self._paused:
                self.resume_reading()
        elif exchange.whole and not (self._deaf or self._waiting):
            self.transport.close()
        else:
            self._end()

    def pause_writing(self) -> None:
        self.drained, self.takes_more = self.loop.create_future(), False

    def resume_writing(self) -> None:
        if self.drained is not None:
            if not self.drained.done():
                self.drained.set_result(None)
            self.drained, self.takes_more = None, True


class Exchange:
    """One request and its response."""

    task: asyncio.Task[None]
    whole = False  # the request has arrived
    started = False
    complete = False
    gone = False  # the client has left
    on_leave: Callable[[], None] | None = None
    _body_bytes = 0
    _due_s, _come = 0.0, LEAST_BODY  # until when more must come, and the bytes since that was set
    _news: asyncio.Event | None = None  # for an application that waits
    _read = False  # the application has the end of the body
    _head = b""  # that has not left
    chunked = False  # its body leaves in chunks
    _left: int | None = None  # bytes of the body that are declared and not sent

    def __init__(self, connection: HttpProtocol, scope: Scope, keep_alive: bool) -> None:
        scope[EXCHANGE_KEY] = self
        self.scope = scope
        self.keep_alive = keep_alive
        self.connection = connection
        self.transport = connection.transport
        self._body: list[bytes] = []

    # ---- for its connection

    def take(self, body: bytes) -> int:
        """A part of the request's body; returns how many bytes wait for the application."""
        if not self.complete:
            self._body.append(body)
            self._body_bytes += len(body)
            self._come += len(body)
        self.wake()
        return self._body_bytes

    def leave(self) -> None:
        self.gone = True
        self.wake()
        if self.on_leave is not None:
            self.on_leave()

    def wake(self) -> None:
        if self._news is not None:
            self._news.set()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self.receive, self.send)
            if not self.complete and not self.gone:
                raise RuntimeError("the application ended before its response did")
        except Exception:  # not swallowed: logged with its traceback, and the client sees that the response is broken
            log.exception("a request failed")
            if self.gone or (self.started and not self._head):
                self.transport.close()
            else:
                self._start(500, FAILED)
                self.write(b"Internal Server Error", more=False)
        except asyncio.CancelledError:
            self.transport.close()
            raise
        finally:  # nothing holds itself, so that all goes without the garbage collector
            self.on_leave = None
            del self.scope[EXCHANGE_KEY]
            self.connection.state.tasks.discard(self.task)
            del self.task

    # ---- for the application

    async def until_writable(self) -> None:
        while (drained := self.connection.drained) is not None:
            await asyncio.shield(drained)

    def take_whole(self) -> bytes | None:
        """The body, if all of it is here and nothing of it was read."""
        if not self.whole or self._read:
            return None
        self._read = True
        return self._body.pop() if len(self._body) == 1 else self._taken()

    async def receive(self) -> Message:
        if self._waits():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.connection.resume_reading()
        if self._come >= LEAST_BODY:
            self._come, self._due_s = 0, self.connection.loop.time() + self.connection.body_timeout_s
        while not (self.gone or self.complete or self._body or (self.whole and not self._read)):
            await self._more()
        if self.gone or self.complete:
            return {"type": "http.disconnect"}
        self._read = self.whole
        return {"type": "http.request", "body": self._taken(), "more_body": not self.whole}

    async def _more(self) -> None:
        """Waits for news. A client that sends a body byte by byte would hold memory for as long as it likes."""
        if self._news is None:
            self._news = asyncio.Event()
        self._news.clear()
        try:
            async with asyncio.timeout_at(None if self.whole or self.started else self._due_s):
                await self._news.wait()
        except TimeoutError:
            if not (self._news.is_set() or self.connection.ready()):
                limit = f"within {self.connection.body_timeout_s:g} s (--body-timeout-s)"
                reason = f"The body came too slowly: {LEAST_BODY >> 10} KiB of it, or its end, must come {limit}."
                raise HttpError(408, reason, "RequestTimeoutError", {"Connection": "close"}) from None

    def _taken(self) -> bytes:
        pieces, self._body, self._body_bytes = self._body, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _waits(self) -> bool:
        """Whether the client asks before it sends the body, and has no answer yet."""
        if self.whole or self._due_s or self._body or self.started or self.gone or self.scope["http_version"] != "1.1":
            return False
        return any(name == b"expect" and value.lower() == b"100-continue" for name, value in self.scope["headers"])

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self.started:
                raise RuntimeError("a response starts once")
            body, more = message.get(WHOLE_KEY), False
            self._start(message["status"], message.get("headers", ()), None if body is None else len(body))
            if body is None:
                self.connection.loop.call_soon(self._send_head)
                return
        else:
            body, more = message.get("body", b""), message.get("more_body", False)
        if self.connection.drained is not None:
            await self.until_writable()
        self.write(body, more)

    def _start(self, status: int, headers: Any, length: int | None = None) -> None:
        self.keep_alive = self.keep_alive and (self.whole or not self._waits())  # whether its body follows is not known
        bodiless = self.scope["method"] == "HEAD" or status in BODILESS
        self.chunked, self._left = False, length
        lines = [*self.connection.state.default_headers, *headers]
        named = dict(headers)
        if b"connection" in named:
            values = b",".join(value for name, value in lines if name == b"connection")
            self.keep_alive = self.keep_alive and b"close" not in values.lower()
            lines = [header for header in lines if header[0] != b"connection"]
        if length or (length is not None and not bodiless):
            lines.append((b"content-length", b"%d" % length))
        elif b"content-length" in named:
            self._left = int(named[b"content-length"])
        if bodiless:
            self._left = 0
        elif self._left is None and self.scope["http_version"] == "1.1":
            self.chunked = True
            lines.append((b"transfer-encoding", b"chunked"))
        elif self._left is None:
            self.keep_alive = False
        if not self.keep_alive:
            lines.append((b"connection", b"close"))
        self._head, self.started = head_of([STATUS_LINES[status], *map(b": ".join, lines)]), True

    def _send_head(self) -> None:
        """The body is not there yet."""
        if self._head and not self.gone:
            self.transport.write(self._head)
        self._head = b""

    def write(self, data: bytes, more: bool = True) -> None:
        """Sends a part of the body. What the client does not take waits in memory: see `until_writable`."""
        if self.gone:
            return
        if self.complete or not self.started:
            raise RuntimeError("a part of a body belongs to no response")
        if self.chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if not more:
                data += b"0\r\n\r\n"
        elif self._left is not None:
            if self.scope["method"] == "HEAD":
                data = b""
            self._left -= len(data)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the body has not the length that its head declares")
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.transport.write(data)
        if not more:
            self.complete = True
            self._body, self._body_bytes = [], 0
            self.wake()
            self.connection.answered(self)


def head_of(lines: list[bytes]) -> bytes:
    """The lines of a head, and the empty one behind them."""
    text = b"".join(lines)
    if LF in text or CR in text:  # as numbers: to look for bytes takes several times as long
        raise ConnectionError("a header with a line break cannot be sent")
    return b"\r\n".join([*lines, b"", b""])
