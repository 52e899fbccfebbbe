"""A gateway on the test's own event loop, on a free port, with quick checks; always ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.app import GatewayApp
from bough.gateway.core import Gateway
from bough.gateway.management import Management
from bough.server.app import Front, with_cors
from bough.server.browsers import BrowserRules
from bough.server.http import HttpServer, is_loopback, open_listener, url_of
from tests.fakes.workers import FakeWorker

PATIENCE_S = 30.0
QUICK: dict[str, Any] = {
    "port": 0,
    "policy": "round_robin",
    "health_check_interval_secs": 0.2,
    "health_check_timeout_secs": 0.3,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    "retry_initial_backoff_ms": 1.0,
    "retry_max_backoff_ms": 20.0,
}


@dataclass
class Desk:
    """A running gateway and a client of it."""

    gateway: Gateway
    front: Front
    url: str
    client: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        return await self.call("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        return await self.call("POST", path, json=body, **options)

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.client.request(method, self.url + path, **options) as response:
            raw = await response.read()
            try:
                return response.status, json.loads(raw)
            except ValueError:
                return response.status, raw

    async def stream(self, body: dict[str, Any], path: str = "/v1/completions", **options: Any) -> bytes:
        body = {"stream": True, **body}
        async with self.client.post(self.url + path, json=body, **options) as response:
            assert response.status == 200, await response.text()
            return await response.read()


@contextlib.asynccontextmanager
async def desk(*fakes: FakeWorker, healthy: int | None = None, **settings: Any) -> AsyncIterator[Desk]:
    """A gateway in front of these workers, ready when `healthy` of them (all, if left out) are in rotation."""
    urls = tuple(fake.url for fake in fakes)
    chosen = GatewaySettings(**{**QUICK, "worker_urls": urls, **settings})
    edge = chosen
    listener = open_listener(edge)
    gateway, front = Gateway(chosen), Front(browsers=BrowserRules(edge, loopback=is_loopback(listener)))
    http = HttpServer(front, listener, edge)
    await gateway.open()
    front.open(with_cors(GatewayApp(gateway, Management(gateway)), edge))
    serving = asyncio.create_task(http.run_here())
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as client:
            wanted = len(urls) if healthy is None else healthy
            await until(lambda: http.started and sum(w.available for w in gateway.registry) >= wanted)
            yield Desk(gateway, front, url_of(listener, edge), client)
    finally:
        http.leave(0)
        await serving
        await gateway.close()
        listener.close()


async def until(condition: Callable[[], Any]) -> None:
    """Waits for something that must come to be."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
