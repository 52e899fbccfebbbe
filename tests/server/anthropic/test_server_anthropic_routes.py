"""Anthropic's routes over a scripted engine: prompts, answers, streams, refusals."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.server.anthropic import routes
from bough.server.anthropic.requests import CountTokensRequest, MessagesRequest
from tests.server import protocol_desk
from tests.server.protocol_desk import ODD, Desk

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
USER = "<|im_start|>user\nhi<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"


def at_desk(use: Callable[[Desk], Awaitable[None]], *script: Any, **settings: Any) -> None:
    protocol_desk.at_desk(routes, use, *script, **settings)


async def events_of(desk: Desk, **body: Any) -> list[tuple[str, Any]]:
    answer = await desk.http.post("/v1/messages", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_message() -> None:
    async def use(desk: Desk) -> None:
        answer = await desk.post("/v1/messages", **ASK, model="whatever")
        assert answer.pop("id").startswith("msg_")
        prompt = len(USER.replace("<|im_start|>", "x").replace("<|im_end|>", "x")) + len("xassistant\n")
        assert answer == {
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [{"type": "text", "text": "hello"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": prompt - 1,  # the scripted engine finds one token in its cache
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 1,
                "output_tokens": 6,
            },
        }
        assert await desk.post("/v1/messages/count_tokens", messages=ASK["messages"]) == {"input_tokens": prompt}

    at_desk(use)


def test_the_events_of_a_stream() -> None:
    async def use(desk: Desk) -> None:
        events = await events_of(desk, **ASK)
        assert all(name == data["type"] for name, data in events)
        assert [name for name, _ in events] == [
            "message_start",
            "content_block_start",
            "ping",
            *["content_block_delta"] * 5,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        start = events[0][1]["message"]
        assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
        assert events[1][1]["content_block"] == {"type": "text", "text": ""}
        assert events[3][1] == {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "h"},
        }
        whole = await desk.post("/v1/messages", **ASK)
        assert events[-2][1] == {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": whole["usage"],
        }

    at_desk(use)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, USER + ANSWER),
        ({"system": "be kind"}, "<|im_start|>system\nbe kind<|im_end|>\n" + USER + ANSWER),
        ({"system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, USER + ANSWER),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "you"}]},
            "<|im_start|>user\nhi\nyou<|im_end|>\n" + ANSWER,
        ),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "so ("}]}, USER + ANSWER + "so ("),
    ],
)
def test_prompts(fields: dict[str, Any], prompt: str | None) -> None:
    async def use(desk: Desk) -> None:
        await desk.post("/v1/messages", **{**ASK, **fields})
        assert desk.prompt == (prompt or "<|im_start|>system\nbe<|im_end|>\n" + USER + ANSWER)
        count = await desk.post("/v1/messages/count_tokens", **{"messages": ASK["messages"], **fields})
        assert count["input_tokens"] == len(desk.asked.input_ids) // 4

    at_desk(use)


def test_sampling_fields_reach_the_engine() -> None:
    async def use(desk: Desk) -> None:
        await desk.post("/v1/messages", **ASK, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"])
        sampling = desk.asked.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
        assert (sampling.stop, sampling.max_new_tokens) == (("a", "b"), 9)
        await desk.post("/v1/messages", **ASK, top_k=0, metadata={"user_id": "u"}, thinking={"type": "disabled"})
        assert desk.asked.sampling.top_k == -1

    at_desk(use)


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (FinishStop(257), "end_turn", None),
        (FinishStop(None), "end_turn", None),
        (FinishStop("###"), "stop_sequence", "###"),
        (FinishLength(0), "max_tokens", None),
    ],
)
def test_why_an_answer_ends(finish: Any, reason: str, sequence: str | None) -> None:
    async def use(desk: Desk) -> None:
        answer = await desk.post("/v1/messages", **ASK)
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
        assert answer["content"] == [{"type": "text", "text": ""}]
        events = await events_of(desk, **ASK)
        assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}

    at_desk(use, lambda request: finish)


def test_a_limit_beyond_the_context_is_cut_and_named() -> None:
    async def use(desk: Desk) -> None:
        for limit in (511, 512, 1000):  # the context is 512 tokens
            (warning,) = (await desk.post("/v1/messages", **{**ASK, "max_tokens": limit}))["warnings"]
            assert warning.startswith(f"max_tokens is {limit}, but the prompt leaves ")

    at_desk(use)


def test_timings_on_request() -> None:
    async def use(desk: Desk) -> None:
        answer = await desk.http.post("/v1/messages", json={**ASK, "return_timings": True})
        assert "total_s" in answer.json()["timings"] and "prefill;dur=" in answer.headers["server-timing"]
        events = await events_of(desk, **ASK, return_timings=True)
        assert "total_s" in events[-2][1]["timings"]

    at_desk(use)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 1.5}, "temperature must be between 0 and 1"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -3}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source must be"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"output_format": {"type": "json_schema", "schema": ""}}, "output_format must have the type"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    async def use(desk: Desk) -> None:
        for stream in (False, True):
            answer = await desk.post("/v1/messages", 400, **{**ASK, **fields, "stream": stream})
            assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
            assert named in answer["error"]["message"]
        assert desk.engine.requests == []

    at_desk(use)


def test_refusals_of_the_engine() -> None:
    full = FinishAbort("The request queue is full.", 429, "QueueFullError")

    async def use(desk: Desk) -> None:
        for stream in (False, True):
            answer = await desk.http.post("/v1/messages", json={**ASK, "stream": stream})
            assert answer.status_code == 429 and answer.headers["retry-after"]
            assert answer.json()["error"]["type"] == "rate_limit_error"

    at_desk(use, lambda request: full)


def test_an_aborted_answer_is_not_passed_off_as_a_complete_one() -> None:
    async def use(desk: Desk) -> None:
        answer = await desk.post("/v1/messages", 499, **ASK)
        assert "aborted" in answer["error"]["message"]

    at_desk(use, lambda request: FinishAbort("aborted", 499, "AbortError"))


def test_unknown_fields_pass_unless_the_server_is_strict() -> None:
    async def lenient(desk: Desk) -> None:
        said = ["Unknown field 'betas' has no effect."]
        assert (await desk.post("/v1/messages", **ASK, betas=["x"]))["warnings"] == said
        assert (await events_of(desk, **ASK, betas=["x"]))[-2][1]["warnings"] == said
        assert "warnings" not in await desk.post("/v1/messages", **ASK)
        said = ["Unknown field 'stop' has no effect. Did you mean 'stop_sequences'?"]
        assert (await desk.post("/v1/messages", **ASK, stop=["x"]))["warnings"] == said

    async def strict(desk: Desk) -> None:
        answer = await desk.post("/v1/messages", 400, **ASK, betas=["x"])
        assert "betas" in answer["error"]["message"]

    at_desk(lenient)
    at_desk(strict, strict_fields=True)


@pytest.mark.parametrize(
    ("path", "struct", "base"),
    [
        ("/v1/messages", MessagesRequest, ASK),
        ("/v1/messages/count_tokens", CountTokensRequest, {"messages": ASK["messages"]}),
    ],
)
def test_odd_values_are_served_or_refused_by_name(path: str, struct: Any, base: dict[str, Any]) -> None:
    async def use(desk: Desk) -> None:
        for field in struct.__struct_fields__:
            for value in ODD:
                reply = await desk.http.post(path, json={**base, field: value})
                assert reply.status_code in (200, 400), (field, value, reply.text)
                if reply.status_code == 400:
                    assert field in reply.json()["error"]["message"], (field, value, reply.text)

    at_desk(use)
