"""Many open streams at once: each is held, fed and ended, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np

from bough.core.finish import FinishLength
from bough.messages.outputs import Delta, Deltas
from bough.server.app import App
from bough.server.protocols import all_endpoints
from tests.server.native_engine import NativeEngine

STREAMS = 300


class Connection:
    """One client of the application, spoken to without a socket; it stays until it has all of its answer."""

    def __init__(self, app: App, body: dict[str, Any]) -> None:
        self.received = b""
        self._body = json.dumps(body).encode()
        self._asked = False
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._asked:
            await asyncio.Event().wait()
        self._asked = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Any) -> None:
        self.received += message.get("body", b"")


def test_many_streams_are_held() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: None)
        context = engine.context()
        app = App(all_endpoints(context), context.settings.server)
        body = {"text": "a", "stream": True}
        connections = [Connection(app, body) for _ in range(STREAMS)]
        while len(engine.requests) < STREAMS:
            await asyncio.sleep(0)
        token = np.array([97], dtype=np.int32).tobytes()
        engine.client.receive(Deltas([Delta(request.handle, "a", token) for request in engine.requests]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bough") as http:
            assert (await http.get("/health")).status_code == 200
        while not all(connection.received for connection in connections):
            await asyncio.sleep(0)
        assert not any(connection.task.done() for connection in connections)
        finish = FinishLength(2)
        engine.client.receive(Deltas([Delta(r.handle, "b", token, finish=finish) for r in engine.requests]))
        await asyncio.gather(*(connection.task for connection in connections))
        for connection in connections:
            first, last, done = connection.received.decode().strip().split("\n\n")
            assert json.loads(first[6:])["text"] == "a" and json.loads(last[6:])["text"] == "ab"
            assert done == "data: [DONE]"

    asyncio.run(go())
