"""Prompts that are longer than any context, on every route that takes text."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from bough.client.inputs import InputReader
from bough.tokenizer.tokenizer import PIECE, TextBound, Tokenizer
from tests.fakes.scripted_engine import IM_END
from tests.server.native_engine import NativeEngine, open_server

LONG = "x" * (2 * PIECE)
TURNS = {"messages": [{"role": "user", "content": LONG}]}
CHAT = {**TURNS, "max_tokens": 3}
SHORT = [{"role": "user", "content": "a"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{LONG}"}}'}}
ROUTES = [
    ("/generate", {"text": ["short", LONG]}),
    ("/generate", {"text": LONG, "stream": True}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": LONG}),
    ("/v1/messages", CHAT),
    ("/api/chat", CHAT),
    ("/api/generate", {"prompt": LONG, "raw": True}),
]
COUNTS = [("/tokenize", {"prompt": LONG}), ("/v1/tokenize", TURNS), ("/v1/messages/count_tokens", TURNS)]
FIELDS = {"/generate": "text", "/v1/chat/completions": "messages", "/tokenize": "prompt", "/v1/tokenize": "messages"}


def ask(path: str, body: dict[str, Any], *, cut: bool, **settings: Any) -> Any:
    async def go() -> Any:
        engine = NativeEngine(lambda message: [*b"hello", IM_END])
        engine.tokenizer = engine.tokenizer.bounded(TextBound(512, cut=cut, least=1024))
        engine.reader = InputReader(engine.tokenizer, {}, random_seed=7)
        async with open_server(engine, **settings) as http:
            return await http.post(path, json=body), engine.requests

    return asyncio.run(go())


@pytest.mark.parametrize(("path", "body"), [*ROUTES, *COUNTS])
def test_they_are_refused_with_both_numbers(path: str, body: dict[str, Any]) -> None:
    answer, requests = ask(path, body, cut=False)
    assert answer.status_code == 400 and not requests
    assert "more than 1024 tokens is longer than the model's context length of 512 tokens" in answer.text
    if path in FIELDS:
        assert answer.json()["error"]["param"] == FIELDS[path]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_the_engine_gets_their_beginning_where_it_may_cut_them(path: str, body: dict[str, Any]) -> None:
    answer, requests = ask(path, body, cut=True)
    assert answer.status_code == 200
    assert 1024 < len(requests[-1].input_ids) // 4 <= PIECE


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a" + LONG + "yz"}),
        ("/v1/completions", {"prompt": ["b", "a" + LONG + "yz"]}),
        ("/v1/chat/completions", {"input_ids": [1] * (1 << 19) + [*b"yz"]}),
    ],
)
def test_the_end_stays_where_the_last_tokens_are_asked_for(path: str, body: dict[str, Any]) -> None:
    answer, requests = ask(path, {**body, "truncate_prompt_tokens": 3}, cut=True, allow_auto_truncate=True)
    assert answer.status_code == 200
    assert np.frombuffer(requests[-1].input_ids, np.int32)[1:].tolist() == [*b"yz"]


def test_the_end_of_a_long_conversation_stays() -> None:
    turns = [{"role": "user", "content": LONG + "yz"}]
    _, (short,) = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "yz"}]}, cut=True)
    body = {"messages": turns, "truncate_prompt_tokens": 15}
    _, (long,) = ask("/v1/chat/completions", body, cut=True)
    assert len(long.input_ids) == 60 and long.input_ids == short.input_ids[-60:]


def test_ids_without_end_are_cut_before_they_are_looked_at() -> None:
    async def go() -> int:
        engine = NativeEngine(lambda message: [IM_END])
        async with open_server(engine, allow_auto_truncate=True) as http:
            answer = await http.post("/generate", json={"input_ids": [1] * 262145})
            assert answer.status_code == 200
        return len(engine.requests[-1].input_ids) // 4

    assert asyncio.run(go()) == 262144


@pytest.mark.parametrize(("path", "body"), COUNTS)
def test_a_count_is_never_that_of_a_beginning(path: str, body: dict[str, Any]) -> None:
    assert ask(path, body, cut=True)[0].status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, *SHORT]},
        {"chat_template_kwargs": {"a": [LONG]}},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": LONG}, *SHORT]},
    ],
)
def test_all_that_a_template_writes_decides_whether_a_thread_does_it(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    write = Tokenizer.apply_chat_template

    def noted(tokenizer: Tokenizer, *args: Any, **options: Any) -> str:
        threads.append(threading.current_thread())
        return write(tokenizer, *args, **options)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", noted)
    ask("/v1/chat/completions", {"messages": SHORT, "max_tokens": 1}, cut=True)
    ask("/v1/chat/completions", {"messages": SHORT, "max_tokens": 1, **body}, cut=True)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
