"""HTTP for load generators: the gateway's client for one server."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bough.core.errors import BoughError, SettingsError
from bough.gateway import http_client
from bough.gateway.upstream_response import UpstreamResponse

TIMEOUT_S = 600.0
CONTENT_TYPE = (b"Content-Type", b"application/json")
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
    """Opens as many connections as there are requests at once."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise SettingsError(f"{url!r} is not the address of a server; give one such as http://127.0.0.1:30000.")
        self._origin = http_client.Origin.of(url)
        sent = {"Accept": "*/*", **(headers or {})}
        self._headers = [(name.encode(), value.encode()) for name, value in sent.items()]
        self._timeout_s = timeout_s
        # A server under load may take long to accept, so connecting has no limit of its own.
        self._client = http_client.HttpClient(connect_timeout_s=timeout_s)

    async def post(self, path: str, body: Any, on_data: OnData | None = None) -> HttpResponse:
        """Sends JSON, or bytes that are JSON. With `on_data` the body of a 200 goes there as it arrives."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self._request("POST", path, raw, on_data)

    async def get(self, path: str) -> HttpResponse:
        return await self._request("GET", path, b"", None)

    def close(self) -> None:
        self._client.close()

    async def _request(self, method: str, path: str, body: bytes, on_data: OnData | None) -> HttpResponse:
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.closing(await self._send(method, path, body)) as response:
                    answer = HttpResponse(response.status)
                    take = on_data if on_data is not None and response.status == 200 else answer.body.extend
                    while piece := await response.read_some():
                        take(piece)
                    return answer
        except TimeoutError:
            raise HttpFailure(f"no answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise HttpFailure(str(error) or type(error).__name__) from None

    async def _send(self, method: str, path: str, body: bytes) -> UpstreamResponse:
        headers = [*self._headers, CONTENT_TYPE] if body else self._headers
        while True:
            try:
                return await self._client.request(self._origin, method, path.encode(), headers, body)
            except http_client.StaleConnectionError:
                continue  # the server closed a kept connection; each is tried once
