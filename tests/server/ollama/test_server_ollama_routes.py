"""Ollama's routes over a scripted engine: prompts, options, answers, lines, refusals, the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import pytest

from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.server import bodies
from bough.server.ollama import routes
from bough.server.ollama.requests import ChatRequest, GenerateRequest, Options, ShowRequest
from tests.server import protocol_desk
from tests.server.protocol_desk import ODD, Desk

HI = [{"role": "user", "content": "hi"}]
USER = "<|im_start|>user\nhi<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
CALLS: list[tuple[str, dict[str, Any]]] = [("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "hi"})]
FIGURES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def at_desk(use: Callable[[Desk], Awaitable[None]], *script: Any, **settings: Any) -> None:
    protocol_desk.at_desk(routes, use, *script, **settings)


async def lines_of(desk: Desk, path: str, **body: Any) -> list[Any]:
    answer = await desk.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.split("\n")[:-1]]


def text_of(answer: Any) -> str:
    text: str = answer["message"]["content"] if "message" in answer else answer["response"]
    return text


@pytest.mark.parametrize(("path", "base"), CALLS)
def test_an_answer_whole_and_in_lines(path: str, base: dict[str, Any]) -> None:
    async def use(desk: Desk) -> None:
        whole = await desk.post(path, **base, model="whatever", stream=False)
        assert whole["model"] == "tiny" and whole["done"] is True and whole["done_reason"] == "stop"
        assert text_of(whole) == "hello" and whole["eval_count"] == 6
        assert whole["prompt_eval_count"] == len(desk.asked.input_ids) // 4
        assert all(isinstance(whole[name], int) and whole[name] >= 0 for name in FIGURES)
        assert datetime.fromisoformat(whole["created_at"]).tzinfo is not None
        lines = await lines_of(desk, path, **base)
        assert [text_of(line) for line in lines] == [*"hello", ""]
        assert [line["done"] for line in lines] == [False] * 5 + [True]
        assert not any(name in line for line in lines[:-1] for name in (*FIGURES, "done_reason"))
        assert lines[-1].keys() == whole.keys() and lines[-1]["done_reason"] == "stop"

    at_desk(use)


def test_messages_carry_their_role() -> None:
    async def use(desk: Desk) -> None:
        answer = await desk.post("/api/chat", messages=HI, stream=False)
        assert answer["message"] == {"role": "assistant", "content": "hello"}

    at_desk(use)


@pytest.mark.parametrize(
    ("path", "fields", "prompt"),
    [
        ("/api/chat", {"messages": HI}, USER + ANSWER),
        ("/api/chat", {"messages": [*HI, {"role": "assistant", "content": "so ("}]}, USER + ANSWER + "so ("),
        ("/api/chat", {"messages": HI, "think": False, "format": "", "tools": [], "keep_alive": "5m"}, USER + ANSWER),
        ("/api/generate", {"prompt": "hi"}, USER + ANSWER),
        ("/api/generate", {"prompt": "hi", "system": "s"}, "<|im_start|>system\ns<|im_end|>\n" + USER + ANSWER),
        ("/api/generate", {"prompt": "hi", "raw": True}, "hi"),
        ("/api/generate", {"prompt": "hi", "template": "", "context": [], "keep_alive": -1}, USER + ANSWER),
    ],
)
def test_prompts(path: str, fields: dict[str, Any], prompt: str) -> None:
    async def use(desk: Desk) -> None:
        await desk.post(path, **fields, stream=False)
        assert desk.prompt == prompt

    at_desk(use)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"max_new_tokens": 512, "temperature": 1.0, "top_k": -1}),
        ({"num_predict": 7}, {"max_new_tokens": 7}),
        ({"num_predict": -2}, {"max_new_tokens": 512}),
        ({"temperature": 0.5, "top_p": 0.9, "min_p": 0.1}, {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1}),
        ({"top_k": 40}, {"top_k": 40}),
        ({"top_k": 0}, {"top_k": -1}),
        ({"seed": 3}, {"sampling_seed": 3}),
        ({"seed": -1}, {"sampling_seed": None}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        ({"num_ctx": 4096, "num_gpu": 99, "mirostat": 0, "typical_p": 1.0}, {"max_new_tokens": 512}),
    ],
)
def test_options_reach_the_engine(options: dict[str, Any], expected: dict[str, Any]) -> None:
    async def use(desk: Desk) -> None:
        await desk.post("/api/chat", messages=HI, options=options, stream=False)
        assert {name: getattr(desk.asked.sampling, name) for name in expected} == expected

    at_desk(use)


def test_a_limit_beyond_the_context_is_cut_and_named() -> None:
    async def use(desk: Desk) -> None:
        for path, body in (*CALLS, ("/api/generate", {"prompt": "a", "raw": True})):
            for limit in (512, 513):
                answer = await desk.post(path, **body, options={"num_predict": limit}, stream=False)
                (warning,) = answer["warnings"]
                assert warning.startswith(f"options.num_predict is {limit}, but the prompt leaves ")
            assert "warnings" not in await desk.post(path, **body, options={"num_predict": -1}, stream=False)

    at_desk(use)


@pytest.mark.parametrize(("path", "base"), CALLS)
def test_nothing_to_answer_means_load(path: str, base: dict[str, Any]) -> None:
    async def use(desk: Desk) -> None:
        nothing: dict[str, Any] = dict.fromkeys(base)
        answer = await desk.post(path, **nothing, keep_alive=0)
        assert answer["done"] is True and answer["done_reason"] == "load" and text_of(answer) == ""
        assert desk.engine.requests == []

    at_desk(use)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (FinishStop("a"), "stop"),
        (FinishLength(0), "length"),
        (FinishAbort("aborted", 499, "AbortError"), "abort"),
    ],
)
def test_why_an_answer_ends(finish: Any, reason: str) -> None:
    async def use(desk: Desk) -> None:
        assert (await desk.post("/api/generate", prompt="hi", stream=False))["done_reason"] == reason
        assert (await lines_of(desk, "/api/generate", prompt="hi"))[-1]["done_reason"] == reason

    at_desk(use, lambda request: finish)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"format": "yaml"}, "format"),
        ("/api/chat", {"think": True}, "think"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools"),
        ("/api/chat", {"logprobs": True}, "logprobs"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"options": {"temperature": "warm"}}, "options.temperature"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
        ("/api/chat", {"options": {"top_p": 3}}, "options.top_p"),
        ("/api/chat", {"options": {"top_k": -5}}, "options.top_k"),
        ("/api/chat", {"options": {"min_p": 2}}, "options.min_p"),
        ("/api/chat", {"options": {"frequency_penalty": 3}}, "options.frequency_penalty"),
        ("/api/chat", {"options": {"repeat_penalty": 9}}, "options.repeat_penalty"),
        ("/api/chat", {"options": {"num_predict": 2**40}}, "options.num_predict"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"options": {"typical_p": 0.5}}, "options.typical_p"),
        ("/api/chat", {"options": {"stop": [""]}}, "options.stop"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"suffix": "x"}, "suffix"),
        ("/api/generate", {"images": ["eA=="]}, "images"),
        ("/api/generate", {"context": [1]}, "context"),
        ("/api/generate", {"raw": True, "system": "x"}, "system"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(path: str, fields: dict[str, Any], named: str) -> None:
    async def use(desk: Desk) -> None:
        base = dict(CALLS)[path]
        for stream in (False, None):
            answer = await desk.post(path, 400, **{**base, **fields, "stream": stream})
            assert answer.keys() == {"error"} and named in answer["error"]
            assert "options.options" not in answer["error"]
        assert desk.engine.requests == []

    at_desk(use)


def test_refusals_of_the_engine_and_timings() -> None:
    async def refused(desk: Desk) -> None:
        answer = await desk.http.post("/api/chat", json={"messages": HI})
        assert answer.status_code == 429 and answer.json() == {"error": "The request queue is full."}

    async def timed(desk: Desk) -> None:
        answer = await desk.http.post("/api/chat", json={"messages": HI, "return_timings": True, "stream": False})
        assert "total_s" in answer.json()["timings"] and "prefill;dur=" in answer.headers["server-timing"]
        assert "total_s" in (await lines_of(desk, "/api/chat", messages=HI, return_timings=True))[-1]["timings"]

    at_desk(refused, lambda request: FinishAbort("The request queue is full.", 429, "QueueFullError"))
    at_desk(timed)


def test_unknown_fields_and_options_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    bodies._logged_fields.clear()
    body: dict[str, Any] = {"messages": HI, "options": {"warmth": 3}, "stream": False}

    async def lenient(desk: Desk) -> None:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await desk.post("/api/chat", **body)
        assert sum("options.warmth" in record.getMessage() for record in caplog.records) == 1

    async def strict(desk: Desk) -> None:
        assert "options.warmth" in (await desk.post("/api/chat", 400, **body))["error"]
        assert "whim" in (await desk.post("/api/chat", 400, messages=HI, whim=1))["error"]

    at_desk(lenient)
    at_desk(strict, strict_fields=True)


def test_the_model() -> None:
    async def use(desk: Desk) -> None:
        (model,) = (await desk.http.get("/api/tags")).json()["models"]
        assert model["name"] == model["model"] == "tiny" and model["details"]["family"] == "llama"
        assert datetime.fromisoformat(model["modified_at"]).year == 2023
        names: list[dict[str, Any]] = [
            {"model": "tiny"},
            {"model": "tiny:latest"},
            {"name": "tiny"},
            {"model": "other"},
            {},
        ]
        for name in names:
            shown = await desk.post("/api/show", **name)
            assert shown["model_info"]["llama.context_length"] == 512 and shown["capabilities"] == ["completion"]

    at_desk(use)


@pytest.mark.parametrize(("path", "struct"), [("/api/chat", ChatRequest), ("/api/generate", GenerateRequest)])
def test_odd_values_are_served_or_refused_by_name(path: str, struct: Any) -> None:
    base = dict(CALLS)[path]

    async def use(desk: Desk) -> None:
        bodies = [(field, {**base, field: value}) for field in struct.__struct_fields__ for value in ODD]
        options = [(f, {**base, "options": {f: value}}) for f in Options.__struct_fields__ for value in ODD]
        for field, body in [*bodies, *options]:
            reply = await desk.http.post(path, json=body)
            assert reply.status_code in (200, 400), (field, body, reply.text)
            if reply.status_code == 400:
                assert field in reply.json()["error"], (field, body, reply.text)

    at_desk(use)


def test_odd_names_of_models() -> None:
    async def use(desk: Desk) -> None:
        for field in ShowRequest.__struct_fields__:
            for value in ODD:
                reply = await desk.http.post("/api/show", json={field: value})
                assert reply.status_code in (200, 400, 404), (field, value, reply.text)

    at_desk(use)
