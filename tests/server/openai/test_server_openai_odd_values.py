"""No value of any field gives anything but an answer or a refusal that a client can understand."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from bough.server.app import App
from bough.server.openai.routes import routes
from bough.server.openai.schema import ChatRequest, CompletionRequest, ResponsesRequest
from tests.fakes.scripted_engine import IM_END, ScriptedEngine

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
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "tool", "content": "x", "tool_calls": 3}],
    {},
    {"": None},
    {"1": 1e300},
    {"type": "text"},
    {"format": 3},
    {"range": 1, "raise_exception": 2, "self": 3, "loop": 4},
    {"include_usage": True, "continuous_usage_stats": True},
]
ROUTES: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "a"}),
    ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", ResponsesRequest, {"input": "a"}),
]


@pytest.mark.parametrize(("path", "struct", "base"), ROUTES)
def test_odd_values_are_served_or_refused(path: str, struct: type[msgspec.Struct], base: dict[str, Any]) -> None:
    engine = ScriptedEngine(lambda request: [*b"ok", IM_END])
    context = engine.context()
    app = App(routes(context), context.settings.server)

    async def go() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bough") as http:
            for field in struct.__struct_fields__:
                for value in ODD:
                    given = {**base, field: value}
                    # Thousands of samples prove nothing more.
                    if field in ("n", "best_of") and value == 2**70:
                        continue
                    reply = await http.post(path, json=given)
                    assert reply.status_code in (200, 400), (field, value, reply.status_code, reply.text)
                    if reply.status_code == 400:
                        error = reply.json()["error"]
                        assert error["message"] and error["param"], (field, value, error)

    asyncio.run(go())
