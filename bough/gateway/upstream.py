"""Requests to workers: each with the worker's own key, over connections that are kept.

Owns the HTTP client. Callers see what the worker sent, or an `OSError`: whatever keeps a worker from answering is one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import lru_cache

from bough.gateway.http_client import HttpClient, Origin
from bough.gateway.response import Response
from bough.gateway.worker import Worker

MOST_ORIGINS = 4096
JSON_WANTED = ((b"Accept", b"application/json"),)

_origin = lru_cache(MOST_ORIGINS)(Origin.of)


class Upstream:
    """Used on one event loop, and closed there."""

    def __init__(self) -> None:
        self._client = HttpClient()

    def close(self) -> None:
        self._client.close()

    async def send(
        self, worker: Worker, method: str, target: str, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> Response:
        """The beginning of the worker's response, which must be closed. `target` is the path with its query, as the
        client wrote it."""
        if worker.api_key is not None:
            headers = [*headers, (b"Authorization", b"Bearer " + worker.api_key.encode())]
        return await self._client.request(_origin(worker.url), method, target.encode("latin-1"), headers, body)

    async def ask(
        self,
        worker: Worker,
        method: str,
        target: str,
        timeout_s: float,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
    ) -> tuple[int, bytes]:
        """Status and body of a short answer."""
        async with asyncio.timeout(timeout_s):
            response = await self.send(worker, method, target, headers, body)
            with contextlib.closing(response):
                return response.status, await response.read()

    async def get(self, worker: Worker, target: str, timeout_s: float) -> tuple[int, bytes]:
        return await self.ask(worker, "GET", target, timeout_s, JSON_WANTED)


def told(error: Exception) -> str:
    """What was wrong, for logs and clients: a time that is up says nothing itself."""
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
