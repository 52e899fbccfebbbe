"""A client of one protocol's routes, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from bough.core.finish import FinishReason
from bough.messages.requests import Generate
from bough.server.app import App
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from tests.fakes.scripted_engine import IM_END, ScriptedEngine

HELLO = [*b"hello", IM_END]
Play = Sequence[int] | FinishReason | None
Script = Callable[[Generate], Play]

# Values that some field of a request does not expect.
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    3,
    2**70,
    -(2**70),
    0.5,
    1e308,
    "",
    "x",
    "\0",
    "x" * 300,
    [],
    [None],
    [0],
    [2**70],
    [""],
    ["x", 1],
    [[1], [2]],
    [[]],
    [{}],
    [{"type": "text", "text": "x"}],
    [{"type": "image", "source": {}}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "tool", "content": "x", "tool_calls": 3}],
    [{"role": "user", "content": "x", "images": ["x"]}],
    [{"role": "assistant", "content": "x"}],
    {},
    {"": None},
    {"1": 1e300},
    {"type": "text"},
    {"type": "disabled"},
    {"type": "enabled", "budget_tokens": 9},
    {"format": 3, "effort": []},
    {"range": 1, "raise_exception": 2, "self": 3, "loop": 4},
    {"include_usage": True, "continuous_usage_stats": True},
]


class Desk:
    """Posts requests; the engine behind them shows what it was asked."""

    def __init__(self, http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        self.http = http
        self.engine = engine

    async def post(self, path: str, status: int = 200, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str, status: int = 200) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """The data of each event."""
        answer = await self.http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def asked(self) -> Generate:
        return self.engine.requests[-1]

    @property
    def prompt(self) -> str:
        return self.engine.prompt_text(self.asked)


def at_desk(
    routes: Callable[[ServerContext], list[Endpoint]],
    use: Callable[[Desk], Awaitable[None]],
    script: Script = lambda request: HELLO,
    **settings: Any,
) -> None:
    async def go() -> None:
        engine = ScriptedEngine(script)
        context = engine.context(**settings)
        app = App(routes(context), context.settings.server)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bough") as http:
            await use(Desk(http, engine))

    asyncio.run(go())
