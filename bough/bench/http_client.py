"""HTTP for load generators: kept-alive connections to one server, parsed by httptools (in C).

A stream's bytes reach their reader inside the event loop's read, so that times are those of arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bough.core.errors import BoughError, SettingsError

TIMEOUT_S = 600.0
OnData = Callable[[bytes], None]


class HttpFailure(Exception):
    """No 200, a broken connection, or a timeout."""


class ServerError(BoughError):
    """The server under load cannot be used."""


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """The first request to a server."""
    try:
        yield
    except HttpFailure as error:
        raise ServerError(f"Cannot reach {url}: {error}.") from None


@dataclass(slots=True)
class HttpResponse:
    """`body` stays empty when it was streamed to a reader."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class HttpClient:
    def __init__(self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise SettingsError(f"{url!r} is not the address of a server; give one such as http://127.0.0.1:30000.")
        self._host, self._prefix = address.hostname, address.path.rstrip("/")
        self._port = address.port or (443 if address.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if address.scheme == "https" else None
        shown = {"Host": address.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in shown.items())
        self._timeout_s = timeout_s
        self._free: list[_Connection] = []

    async def post(self, path: str, body: Any, on_data: OnData | None = None) -> HttpResponse:
        """Sends JSON, or bytes that are JSON. With `on_data` the body of a 200 goes there as it arrives."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self._request("POST", path, raw, on_data)

    async def get(self, path: str) -> HttpResponse:
        return await self._request("GET", path, b"", None)

    def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()

    async def _request(self, method: str, path: str, body: bytes, on_data: OnData | None) -> HttpResponse:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        raw = f"{head}\r\n".encode() + body
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(raw, on_data)
        except TimeoutError:
            raise HttpFailure(f"no answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise HttpFailure(str(error) or type(error).__name__) from None

    async def _exchange(self, raw: bytes, on_data: OnData | None) -> HttpResponse:
        while self._free:
            kept = self._free.pop()
            try:
                return await self._over(kept, raw, on_data)
            except _StaleConnectionError:
                continue  # the server closed it while nobody used it
        loop = asyncio.get_running_loop()
        _, fresh = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        return await self._over(fresh, raw, on_data)

    async def _over(self, connection: _Connection, raw: bytes, on_data: OnData | None) -> HttpResponse:
        try:
            response = await connection.exchange(raw, on_data)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._free.append(connection)
        else:
            connection.close()
        return response


class _StaleConnectionError(Exception):
    """A kept connection ended before a byte of the response."""


class _Connection(asyncio.Protocol):
    """One request at a time; the parser calls the `on_` methods."""

    def __init__(self) -> None:
        self.reusable = False
        self._used = False
        self._lost = False
        self._heard = False
        self._on_data: OnData | None = None
        self._done: asyncio.Future[HttpResponse] | None = None  # of the request in progress

    async def exchange(self, raw: bytes, on_data: OnData | None) -> HttpResponse:
        if self._lost:
            raise _StaleConnectionError
        self._parser = httptools.HttpResponseParser(self)
        self._response, self._on_data = HttpResponse(), on_data
        done: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self._done = done
        self._heard = self.reusable = False
        self._transport.write(raw)
        return await done

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(HttpFailure(f"an answer that cannot be read: {error.__context__ or error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._used and not self._heard:
            self._fail(_StaleConnectionError())
        else:
            self._fail(HttpFailure(f"the connection was lost{f': {exc}' if exc else ''}"))

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._on_data is not None and self._response.status == 200:
            self._on_data(body)
        else:
            self._response.body += body

    def on_message_complete(self) -> None:
        self.reusable, self._used = self._parser.should_keep_alive(), True
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class EventReader:
    """Splits a byte stream into the data of server-sent events."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of complete events, without the end mark."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        return [each for each in found if each != b"[DONE]"]
