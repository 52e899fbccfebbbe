"""`return_timings` on every route of generation: the block in the body and the `Server-Timing` header."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_engine import IM_END
from tests.server.native_engine import NativeEngine, open_server

HI = [{"role": "user", "content": "hi"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "hi"}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ("/api/chat", {"messages": HI}),
    ("/api/generate", {"prompt": "hi"}),
]
AT_FIRST = {"queue", "prefill", "ttft", "tokens"}


def ask(path: str, body: dict[str, Any]) -> httpx.Response:
    async def go() -> httpx.Response:
        async with open_server(NativeEngine(lambda request: [*b"hello", IM_END])) as http:
            return await http.post(path, json=body)

    return asyncio.run(go())


def entries(answer: httpx.Response) -> set[str]:
    return {entry.split(";")[0] for entry in answer.headers["server-timing"].split(", ")}


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_whole_answer_tells_everything(path: str, body: dict[str, Any]) -> None:
    answer = ask(path, {**body, "return_timings": True, "stream": False})
    assert entries(answer) == AT_FIRST | {"decode", "total", "tokens_per_second"}
    assert '"tokens_per_second"' in answer.text
    assert "server-timing" not in ask(path, {**body, "stream": False}).headers


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_the_header_of_a_stream_tells_what_is_known_when_it_begins(path: str, body: dict[str, Any]) -> None:
    answer = ask(path, {**body, "return_timings": True, "stream": True})
    assert entries(answer) == AT_FIRST
    assert '"tokens_per_second"' in answer.text
    assert "server-timing" not in ask(path, {**body, "stream": True}).headers
