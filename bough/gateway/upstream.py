"""The HTTP client towards workers: pooled connections, bytes as they are.

Owns the sessions. Nothing is decoded, redirected or retried here; callers see what the worker sent or one of `FAULTS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from bough.gateway.worker import Worker

IDLE_S = 30.0  # workers close idle connections later than that, so a request seldom meets one that is closing
CONNECT_TIMEOUT_S = 5.0  # on one network a host that has not answered by then is not there
READ_BUFFER = 1 << 18
LARGEST_HEADER = 1 << 16


# Whatever keeps a worker from answering; a time that is up is an OSError.
FAULTS = (aiohttp.ClientError, OSError)


class Upstream:
    """Requests to workers."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ttl_dns_cache=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=READ_BUFFER,
            max_line_size=LARGEST_HEADER,
            max_field_size=LARGEST_HEADER,
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self, worker: Worker, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> aiohttp.ClientResponse:
        """The beginning of the worker's response. `target` is the path with its query, as the client wrote it."""
        assert self._session is not None
        return await self._session.request(
            method,
            URL(worker.url + target, encoded=True),
            headers=CIMultiDict([*headers, *_credentials(worker)]),
            data=body or None,
            allow_redirects=False,
        )

    async def get(self, worker: Worker, target: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a short answer."""
        async with asyncio.timeout(timeout_s):
            response = await self.send(worker, "GET", target, [("Accept", "application/json")], b"")
            async with response:
                return response.status, await response.read()


def _credentials(worker: Worker) -> list[tuple[str, str]]:
    return [] if worker.api_key is None else [("Authorization", f"Bearer {worker.api_key}")]
