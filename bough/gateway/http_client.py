"""A small HTTP/1.1 client for a proxy: kept-alive connections, unchanged bytes, little work. Every fault is an
`OSError`.

It retries one safe case: a kept connection that the server was closing, for an idempotent request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from bough.gateway.headers import RawHeaders
from bough.gateway.upstream_response import UpstreamResponse
from bough.gateway.worker import Worker
from bough.server.http_protocol import head_of

IDLE_S = 30.0  # our servers close idle connections later than that, so a request seldom meets one that is closing
CONNECT_TIMEOUT_S = 5.0  # on one network a host that has not answered by then is not there
IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
LONG = 1 << 16  # bytes; a shorter body is copied, because one buffer costs less than two
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})  # these send the length of an empty body too


class StaleConnectionError(ConnectionError):
    """A kept connection ended before a byte of the response: the server may not have seen the request."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where requests go: a host and port, or a unix socket."""

    host: str
    port: int
    tls: bool = False
    name: bytes = b"localhost"  # for the Host header
    prefix: bytes = b""  # before every path
    socket_path: str | None = None

    @classmethod
    def of(cls, url: str) -> Origin:
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        host = parts.hostname or ""
        written = host if ":" in host else host.encode("idna").decode()
        name = f"[{written}]" if ":" in written else written
        if parts.port is not None:
            name += f":{parts.port}"
        return cls(written, parts.port or (443 if tls else 80), tls, name.encode(), parts.path.rstrip("/").encode())


class HttpClient:
    def __init__(self, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, list[_Connection]] = defaultdict(list)  # the longest unused first
        self._sweeping: asyncio.TimerHandle | None = None

    async def request(
        self, origin: Origin, method: str, target: bytes, headers: RawHeaders, body: bytes
    ) -> UpstreamResponse:
        """The beginning of the response, which the caller must close. `target` is the path with its query."""
        raw = _head(origin, method, target, headers, body)
        while True:
            connection = self._take(origin) or await self._connect(origin)
            response = connection.send(raw, body, method == "HEAD")
            try:
                while not response.status:
                    await response.more()
                return response
            except BaseException as error:
                response.close()
                if not isinstance(error, ConnectionError) or not connection.used or response.begun:
                    raise
                if method not in IDEMPOTENT:
                    raise StaleConnectionError("the connection was closed as the request came") from None

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.transport.close()
        self._idle.clear()

    # ---- connections

    async def _connect(self, origin: Origin) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if origin.socket_path is None:
                    return await self._connect_to_any(origin)
                made = functools.partial(_Connection, self, origin)
                return (await asyncio.get_running_loop().create_unix_connection(made, origin.socket_path))[1]
        except TimeoutError:
            raise ConnectionError("it could not be reached in time") from None

    async def _connect_to_any(self, origin: Origin) -> _Connection:
        """The first of the host's addresses that answers; each gets a part of the timeout."""
        loop, made = asyncio.get_running_loop(), functools.partial(_Connection, self, origin)
        tls, name = (self._tls, origin.host) if origin.tls else (None, None)
        found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        failure = OSError(f"{origin.host} has no address")
        for *_, address in found:
            host = str(address[0])
            try:
                async with asyncio.timeout(self._connect_timeout_s / len(found)):
                    return (await loop.create_connection(made, host, origin.port, ssl=tls, server_hostname=name))[1]
            except OSError as error:
                failure = error
        raise failure

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _take(self, origin: Origin) -> _Connection | None:
        kept = self._idle.get(origin)
        while kept:
            connection = kept.pop()
            if connection.is_usable(time.monotonic()):
                return connection
            connection.transport.close()
        return None

    def give_back(self, connection: _Connection) -> None:
        self._idle[connection.origin].append(connection)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(IDLE_S, self._sweep)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for origin, connections in list(self._idle.items()):
            while connections and not connections[0].is_usable(now_s):
                connections.pop(0).transport.close()
            if not connections:
                del self._idle[origin]
        self._sweeping = asyncio.get_running_loop().call_later(IDLE_S, self._sweep) if self._idle else None


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, client: HttpClient, origin: Origin) -> None:
        self.origin = origin
        self.loop = asyncio.get_running_loop()
        self.used = False  # for a request before this one
        self._client = client
        self._lost = False
        self._idle_since_s = 0.0
        self._response: UpstreamResponse | None = None  # in progress

    def is_usable(self, now_s: float) -> bool:
        return not self._lost and now_s - self._idle_since_s < IDLE_S

    def send(self, head: bytes, body: bytes, to_head: bool) -> UpstreamResponse:
        self._response = response = UpstreamResponse(self.transport, self.loop, to_head, self.finished)
        if self._lost:
            response.lost(None)
        elif len(body) > LONG:
            self.transport.writelines([head, body])
        else:
            self.transport.write(head + body)
        return response

    def finished(self, response: UpstreamResponse) -> None:
        self._response = None
        if response.reusable and not self._lost and not self.transport.get_write_buffer_size():
            self.used, self._idle_since_s = True, time.monotonic()
            self._client.give_back(self)
        else:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._response is not None:
            self._response.feed(data)
        else:  # nobody has asked
            self._lost = True
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._response is not None:
            self._response.lost(exc)


def _head(origin: Origin, method: str, target: bytes, headers: RawHeaders, body: bytes) -> bytes:
    first = method.encode() + b" " + origin.prefix + target + b" HTTP/1.1"
    lines = [first, b"Host: " + origin.name, *map(b": ".join, headers)]
    if body or method in WITH_BODY:
        lines.append(b"Content-Length: %d" % len(body))
    return head_of(lines)


_origin = functools.lru_cache(4096)(Origin.of)


class Upstream(HttpClient):
    """Requests to workers, each with the worker's key."""

    def send(
        self, worker: Worker, method: str, target: bytes, headers: RawHeaders, body: bytes
    ) -> Coroutine[Any, Any, UpstreamResponse]:
        """The beginning of the worker's response, which the caller must close."""
        if worker.api_key is not None:
            headers = [*headers, (b"Authorization", b"Bearer " + worker.api_key.encode())]
        return self.request(_origin(worker.url), method, target, headers, body)

    async def ask(
        self, worker: Worker, method: str, target: str, timeout_s: float, headers: RawHeaders = (), body: bytes = b""
    ) -> tuple[int, bytes]:
        async with asyncio.timeout(timeout_s):
            response = await self.send(worker, method, target.encode("latin-1"), headers, body)
            with contextlib.closing(response):
                return response.status, await response.read()

    async def get(self, worker: Worker, target: str, timeout_s: float) -> tuple[int, bytes]:
        return await self.ask(worker, "GET", target, timeout_s, ((b"Accept", b"application/json"),))


def out_of_descriptors(error: BaseException) -> bool:
    """Whether this process, or the whole system, has none left: that says nothing of a worker."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def describe(error: Exception) -> str:
    """A `TimeoutError` has no text of its own."""
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
