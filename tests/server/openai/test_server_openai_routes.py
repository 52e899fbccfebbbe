"""OpenAI's routes end to end, over a scripted engine: answers, streams, errors, responses and their store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from bough.client.outputs import LogprobColumns
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.core.pooling import ALL_EXPERTS
from bough.messages.requests import Abort, Generate
from bough.server.openai import responses, routes
from bough.server.openai.objects import PromptLogprob
from bough.server.openai.response_items import OutputMessage, OutputText, ResponseObject
from bough.server.openai.responses import Record, ResponseStore
from bough.server.openai.writing import TokenSpeller, prompt_logprobs
from tests.fakes.scripted_engine import IM_END
from tests.server import protocol_desk
from tests.server.protocol_desk import HELLO, Desk, Play

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def at_desk(use: Callable[[Desk], Awaitable[None]], *script: Any, **settings: Any) -> None:
    protocol_desk.at_desk(routes, use, *script, **settings)


def test_a_completion() -> None:
    async def use(desk: Desk) -> None:
        answer = await desk.post("/v1/completions", prompt="ab", model="whatever", max_tokens=None)
        assert answer["object"] == "text_completion" and answer["model"] == "tiny"
        assert answer["id"].startswith("cmpl-")
        assert answer["choices"] == [
            {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "matched_stop": IM_END}
        ]
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 6, 8)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}

    at_desk(use)


def test_prompts_of_every_form_are_understood_and_echoed() -> None:
    async def use(desk: Desk) -> None:
        for prompt in ("né", ["né", "b"], list("né".encode()), [[97], [98, 99]]):
            answer = await desk.post("/v1/completions", prompt=prompt, echo=True)
            texts = [choice["text"] for choice in answer["choices"]]
            assert texts in (["néhello"], ["néhello", "bhello"], ["ahello", "bchello"])

    at_desk(use)


def test_echo_with_logprobs_covers_the_prompt() -> None:
    async def use(desk: Desk) -> None:
        answer = await desk.post("/v1/completions", prompt="né", echo=True, logprobs=1, max_tokens=1)
        shown = answer["choices"][0]["logprobs"]
        assert shown["tokens"] == ["n", "\ufffd", "\ufffd", "h", "e", "l", "l", "o", "<|im_end|>"]
        assert shown["token_logprobs"][0] is None and shown["token_logprobs"][3] == -104 / 8
        assert shown["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6, 7]
        assert shown["top_logprobs"][0] is None and shown["top_logprobs"][3] == {"h": -13.0}

    at_desk(use)


def test_prompt_logprobs_in_vllms_form() -> None:
    def of(token: int, rank: int | None) -> dict[str, Any]:
        return {"logprob": -token / 8, "rank": rank, "decoded_token": chr(token)}

    async def use(desk: Desk) -> None:
        asked = {"prompt": ["abc", "d"], "n": 2, "prompt_logprobs": 2}
        choices = (await desk.post("/v1/completions", **asked))["choices"]
        expected = [None, {"98": of(98, 1), "99": of(99, 2)}, {"99": of(99, 1), "100": of(100, 2)}]
        assert [choice["prompt_logprobs"] for choice in choices] == [expected, expected, [None], [None]]
        assert all(choice["logprobs"] is None for choice in choices)
        # The number of those of the answer is its own.
        (choice,) = (await desk.post("/v1/completions", prompt="ab", prompt_logprobs=0, logprobs=2))["choices"]
        assert choice["prompt_logprobs"] == [None, {"98": of(98, 1)}]
        assert choice["logprobs"]["top_logprobs"][0] == {"h": -13.0, "i": -13.125}
        (choice,) = (await desk.post("/v1/completions", prompt="ab", prompt_logprobs=3, logprobs=1))["choices"]
        assert len(choice["prompt_logprobs"][1]) == 3 and choice["logprobs"]["top_logprobs"][0] == {"h": -13.0}
        chat = {"input_ids": [97, 98], "prompt_logprobs": 1, "logprobs": True}
        answer = await desk.post("/v1/chat/completions", **chat)
        assert answer["prompt_logprobs"] == [None, {"98": of(98, 1)}]
        assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        for path, body in (("/v1/completions", asked), ("/v1/chat/completions", chat)):
            error = (await desk.post(path, 400, **body, stream=True))["error"]
            assert error["param"] == "prompt_logprobs" and "stream" in error["message"]
        await desk.post("/v1/responses", 400, input="a", prompt_logprobs=0)

    at_desk(use)


def test_a_prompt_token_that_is_not_among_the_likeliest_has_no_rank() -> None:
    columns = LogprobColumns([(None, 97, None), (-3.0, 98, None)], [None, [(-0.1, 104, None)]], [None, []])
    assert prompt_logprobs(columns, 1, TokenSpeller(None)) == [
        None,
        {"98": PromptLogprob(-3.0, None, "token_id:98"), "104": PromptLogprob(-0.1, 1, "token_id:104")},
    ]


def test_samples_and_the_best_of_them() -> None:
    def script(request: Generate) -> Play:
        return [*{"0": b"zz", "1": b"bb", "2": b"aa"}[request.rid[-1]]]

    async def use(desk: Desk) -> None:
        three = await desk.post("/v1/completions", prompt="p", n=3)
        assert [(c["index"], c["text"]) for c in three["choices"]] == [(0, "zz"), (1, "bb"), (2, "aa")]
        assert three["usage"]["prompt_tokens"] == 1 and three["usage"]["completion_tokens"] == 6
        best = await desk.post("/v1/completions", prompt="p", n=2, best_of=3)
        assert [(c["index"], c["text"]) for c in best["choices"]] == [(0, "aa"), (1, "bb")]
        assert best["usage"]["completion_tokens"] == 6 and best["choices"][0]["logprobs"] is None

    at_desk(use, script)


def test_a_streamed_completion_with_ids_as_benchmarks_read_it() -> None:
    async def use(desk: Desk) -> None:
        events = await desk.stream("/v1/completions", prompt=[97, 98], return_token_ids=True)
        assert events[-1] == "[DONE]"
        choices = [event["choices"][0] for event in events[:-1]]
        assert [token for choice in choices for token in choice["token_ids"]] == HELLO
        assert "".join(choice["text"] for choice in choices) == "hello"

    at_desk(use)


def test_usage_in_streams() -> None:
    async def use(desk: Desk) -> None:
        for path, body in (("/v1/completions", {"prompt": "ab"}), ("/v1/chat/completions", ASK)):
            events = await desk.stream(path, **body, stream_options={"include_usage": True})
            assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 6
            assert all(event["usage"] is None for event in events[:-2])
            events = await desk.stream(path, **body, stream_options={"continuous_usage_stats": True})
            assert events[-2]["usage"]["completion_tokens"] == 6
            assert all(event["usage"]["completion_tokens"] > 0 for event in events[:-1])

    at_desk(use)


def test_a_chat() -> None:
    async def use(desk: Desk) -> None:
        answer = await desk.post("/v1/chat/completions", **ASK, logprobs=True, top_logprobs=2)
        (choice,) = answer["choices"]
        assert answer["object"] == "chat.completion"
        assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "hello"
        assert choice["finish_reason"] == "stop" and choice["matched_stop"] == IM_END
        first = choice["logprobs"]["content"][0]
        assert first["token"] == "h" and first["bytes"] == [104] and first["logprob"] == -13.0
        assert [top["token"] for top in first["top_logprobs"]] == ["h", "i"]
        (request,) = desk.engine.requests
        assert desk.engine.prompt_text(request) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert request.sampling.max_new_tokens == 512

    at_desk(use)


def test_chat_prompts_may_be_continued_shaped_or_given_as_ids() -> None:
    async def use(desk: Desk) -> None:
        turns = [*ASK["messages"], {"role": "assistant", "content": "Well,"}]
        await desk.post("/v1/chat/completions", messages=turns, continue_final_message=True)
        await desk.post("/v1/chat/completions", **ASK, chat_template_kwargs={"mood": "calm"})
        await desk.post("/v1/chat/completions", input_ids=[97, 98])
        texts = [desk.engine.prompt_text(request) for request in desk.engine.requests]
        assert texts[0].endswith("<|im_start|>assistant\nWell,")
        assert texts[1].endswith("<|im_start|>assistant\n(calm)")
        assert texts[2] == "ab"

    at_desk(use)


def test_engine_fields_reach_the_engine_and_extras_come_back() -> None:
    async def use(desk: Desk) -> None:
        extras: dict[str, Any] = {"rid": "mine", "priority": 3, "cache_salt": "s", "extra_key": "k", "seed": 9}
        shown = {"return_token_ids": True, "return_meta_info": True, "return_timings": True}
        answer = await desk.post("/v1/chat/completions", **ASK, **extras, **shown)
        (request,) = desk.engine.requests
        assert (request.rid, request.priority, request.namespace) == ("mine", 3, "k\0s")
        assert request.sampling.sampling_seed == 9
        assert answer["id"] == "mine" and answer["choices"][0]["token_ids"] == HELLO
        assert answer["choices"][0]["meta_info"]["id"] == "mine"
        assert answer["timings"]["prefill_cached_tokens"] == 1
        reply = await desk.http.post("/v1/completions", json={"prompt": "a", "return_timings": True})
        assert "ttft" in reply.headers["server-timing"]
        reply = await desk.http.post("/v1/completions", json={"prompt": "a", "return_timings": True, "stream": True})
        assert "ttft" in reply.headers["server-timing"] and '"timings"' in reply.text

    at_desk(use)


def test_chosen_experts_are_asked_for_and_stand_in_the_choice() -> None:
    async def use(desk: Desk) -> None:
        for path, ask in (("/v1/completions", {"prompt": "ab"}), ("/v1/chat/completions", ASK)):
            answer = await desk.post(path, **ask, return_routed_experts=True)
            assert answer["choices"][0]["sgl_ext"] == {"routed_experts": ""}  # the scripted engine sends none
            assert desk.engine.requests[-1].pooling == ALL_EXPERTS
            plain = await desk.post(path, **ask)
            assert "sgl_ext" not in plain["choices"][0] and desk.engine.requests[-1].pooling is None

    at_desk(use)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", ASK)], ids=["completion", "chat"]
)
def test_where_cached_tokens_were_found_comes_in_sglangs_form(path: str, body: dict[str, Any]) -> None:
    async def use(desk: Desk) -> None:
        asked = {**body, "return_cached_tokens_details": True}
        answer = await desk.post(path, **asked)
        details = answer["sglext"]["cached_tokens_details"]
        assert details == {"device": 1, "host": 0, "storage": 0, "storage_backend": None, "disk": 0, "store": 0}
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
        *_, extras, usage, _ = await desk.stream(path, **asked, stream_options={"include_usage": True})
        assert extras["choices"] == [] and extras["sglext"] == answer["sglext"] and extras["usage"] is None
        assert usage["choices"] == [] and "sglext" not in usage and usage["usage"]["prompt_tokens"]
        *others, extras, _ = await desk.stream(path, **asked)
        assert extras["sglext"] == answer["sglext"] and not any("sglext" in each for each in others)
        assert "sglext" not in await desk.post(path, **body)
        assert not any("sglext" in each for each in await desk.stream(path, **body))

    at_desk(use)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": 3}, "prompt"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": 1e7}, "temperature"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "seed": 2**70}, "seed"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, "stop"),
        ("/v1/completions", {"prompt": [1, 2**40]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 20}, "min_tokens"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {**ASK, "tools": [{"type": "function"}]}, "tools[0].function"),
        ("/v1/chat/completions", {**ASK, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/v1/chat/completions", {**ASK, "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ("/v1/chat/completions", {**ASK, "continue_final_message": True, "add_generation_prompt": True}, None),
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": "a", "input_ids": [1]}, "input_ids"),
        ("/v1/responses", {"input": "a", "min_tokens": 20, "max_output_tokens": 2}, "min_tokens"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
def test_requests_that_are_wrong_get_openais_error(path: str, body: dict[str, Any], param: str | None) -> None:
    async def use(desk: Desk) -> None:
        for stream in (False, True):
            error = (await desk.post(path, 400, **body, stream=stream))["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["param"] == (param or "continue_final_message")
        assert desk.engine.requests == []

    at_desk(use)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"prompt": "\\ud800"}', b'{"prompt": "\xed\xa0\x80"}', b"\xff"])
def test_bodies_that_are_no_json_or_no_unicode_get_a_400(body: bytes) -> None:
    async def use(desk: Desk) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            answer = await desk.http.post(path, content=body)
            assert answer.status_code == 400 and answer.json()["error"]["message"]

    at_desk(use)


def test_nul_emoji_and_combining_marks_survive() -> None:
    text = "a\0b e\u0301 👩‍👩‍👧 שלום"

    def script(request: Generate) -> Play:
        return [*text.encode(), IM_END]

    async def use(desk: Desk) -> None:
        whole = await desk.post("/v1/completions", prompt=text, echo=True)
        assert whole["choices"][0]["text"] == text + text
        events = await desk.stream("/v1/chat/completions", messages=[{"role": "user", "content": text}])
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == text
        assert text in desk.engine.prompt_text(desk.engine.requests[-1])

    at_desk(use, script)


def test_refusals_of_the_engine_keep_their_status() -> None:
    def script(request: Generate) -> Play:
        if request.rid.endswith("bad"):
            return FinishAbort("The request queue is full.", 429, "QueueFullError")
        return HELLO if not request.rid.endswith("-1") else FinishAbort("No.", 400)

    async def use(desk: Desk) -> None:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", ASK),
            ("/v1/responses", {"input": "a"}),
        ):
            for stream in (False, True):
                reply = await desk.http.post(path, json={**body, "stream": stream, "rid": "bad"})
                assert reply.status_code == 429 and reply.headers["retry-after"] == "1"
                assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await desk.post("/v1/completions", 400, prompt=["a", "b"]))["error"]["message"] == "No."

    at_desk(use, script)


def test_unknown_fields_pass_unless_strict() -> None:
    async def lenient(desk: Desk) -> None:
        said = ["Unknown field 'frobnicate' has no effect."]
        answer = await desk.post("/v1/completions", prompt="a", frobnicate=1, return_meta_info=True)
        assert answer["warnings"] == answer["choices"][0]["meta_info"]["warnings"] == said
        answer = await desk.post("/v1/completions", prompt="a", chat_template_kwargs={"enable_thinking": True})
        assert answer["warnings"][0].startswith("Unknown field 'chat_template_kwargs' has no effect.")
        chunks = await desk.stream("/v1/chat/completions", **ASK, frobnicate=1)
        assert [chunk["warnings"] for chunk in chunks[:-1] if "warnings" in chunk] == [said]
        assert "warnings" not in await desk.post("/v1/completions", prompt="a")
        for path, body, meant in (
            ("/v1/completions", {"prompt": "a"}, "max_tokens"),
            ("/v1/chat/completions", ASK, "max_tokens"),
            ("/v1/responses", {"input": "a"}, "max_output_tokens"),
        ):
            said = [f"Unknown field 'max_new_tokens' has no effect. Did you mean {meant!r}?"]
            assert (await desk.post(path, **body, max_new_tokens=3))["warnings"] == said

    async def strict(desk: Desk) -> None:
        error = (await desk.post("/v1/completions", 400, prompt="a", frobnicate=1))["error"]
        assert error["param"] == "frobnicate"
        await desk.post("/v1/completions", prompt="a", stream_options=None)
        inside = {"stream_options": {"include_usage": True, "frobnicate": 1}}
        error = (await desk.post("/v1/completions", 400, prompt="a", **inside))["error"]
        assert error["param"] == "stream_options.frobnicate"

    at_desk(lenient)
    at_desk(strict, strict_fields=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", -1),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("chat_template", "x"),
        ("include_reasoning", False),
        ("thinking_token_budget", 0),
        ("return_sampling_mask", True),
        ("disagg_prefill_dp_rank", 1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("bad_words", [" "]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
    ],
)
def test_fields_that_would_change_the_output_and_are_not_built_are_refused(field: str, value: Any) -> None:
    async def use(desk: Desk) -> None:
        error = (await desk.post("/v1/completions", 400, prompt="a", **{field: value}))["error"]
        assert error["param"] == field
        await desk.post("/v1/completions", prompt="a", **{field: None})

    at_desk(use)


def test_sglangs_fields_of_chats_are_taken_where_they_ask_for_nothing() -> None:
    asked = {"images_config": {"a": 1}, "video_config": {"fps": 1}, "use_audio_in_video": True}

    async def use(desk: Desk) -> None:
        nothing = {**dict.fromkeys(asked), "return_spec_tokens_details": False, "suffix": "", "user": "a"}
        answer = await desk.post("/v1/chat/completions", **ASK, **nothing, max_dynamic_patch=None, service_tier="auto")
        assert "warnings" not in answer
        for field, value in asked.items():
            error = (await desk.post("/v1/chat/completions", 400, **ASK, **{field: value}))["error"]
            assert error["param"] == field

    at_desk(use, strict_fields=True)


def test_vllms_rules_about_tokens_and_stops() -> None:
    async def use(desk: Desk) -> None:
        await desk.post("/v1/completions", prompt="abcd", truncate_prompt_tokens=2, include_stop_str_in_output=True)
        assert desk.prompt == "cd" and desk.asked.sampling.no_stop_trim
        most: dict[str, Any] = {"truncate_prompt_tokens": -1}  # of a context of 512
        for asked, kept in ((12, 500), (511, 1), (0, 512)):
            await desk.post("/v1/completions", prompt="a" * 600 + "b", max_tokens=asked, **most)
            assert desk.prompt == "a" * (kept - 1) + "b"
        await desk.post("/v1/completions", 400, prompt="ab", max_tokens=512, **most)
        await desk.post("/v1/chat/completions", input_ids=[97] * 600, **most)
        assert desk.prompt == "a" * 511
        await desk.post("/v1/completions", prompt="ab", max_tokens=12, **most)
        assert desk.prompt == "ab"
        await desk.post("/v1/completions", prompt="a", bad_words=["x"], logit_bias={"5": 1})
        assert desk.asked.sampling.logit_bias == {5: 1.0, ord("x"): -1e9}
        assert desk.asked.bad_words == ()  # " x" cannot be said without "x"
        await desk.post("/v1/completions", prompt="a", bad_words=["no", " no"])
        assert desk.asked.bad_words == (tuple(b"no"), tuple(b" no")) and not desk.asked.sampling.logit_bias
        await desk.post("/v1/chat/completions", **ASK, allowed_token_ids=[7, 8], logit_bias={"7": 1}, temperature=2)
        assert desk.asked.sampling.logit_bias == {7: 2001.0, 8: 2000.0}
        await desk.post("/v1/completions", 400, prompt="a", allowed_token_ids=[7], repetition_penalty=1.2)

    at_desk(use)


def test_variables_of_the_template_have_defaults() -> None:
    async def use(desk: Desk) -> None:
        await desk.post("/v1/chat/completions", **ASK)
        assert desk.prompt.endswith("(calm)")
        await desk.post("/v1/chat/completions", **ASK, chat_template_kwargs={"mood": "wild"})
        assert desk.prompt.endswith("(wild)")

    at_desk(use, default_chat_template_kwargs='{"mood": "calm"}')


def test_an_answer_longer_than_the_context_is_refused_unless_it_may_be_cut() -> None:
    """The context is 512 tokens."""
    asks: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": "ab"}, "max_tokens"),
        ("/v1/chat/completions", ASK, "max_tokens"),
        ("/v1/chat/completions", ASK, "max_completion_tokens"),
        ("/v1/responses", {"input": "a"}, "max_output_tokens"),
    ]

    async def refused(desk: Desk) -> None:
        for path, body, name in asks:
            error = (await desk.post(path, 400, **body, **{name: 512}))["error"]
            assert error["code"] == "context_length_exceeded" and error["param"] == name
            assert f"and {name} asks for 512 more" in error["message"]
            assert "exceeds the model's maximum context length of 512 tokens" in error["message"]
            assert "warnings" not in await desk.post(path, **body)
        assert (await desk.post("/v1/completions", prompt="ab", max_tokens=510))["choices"]
        await desk.post("/v1/completions", 400, prompt="ab", max_tokens=511)

    async def cut(desk: Desk) -> None:
        for path, body, name in asks:
            for limit in (512, 513):
                (warning,) = (await desk.post(path, **body, **{name: limit}))["warnings"]
                assert warning.startswith(f"{name} is {limit}, but the prompt leaves ")
            assert "warnings" not in await desk.post(path, **body)

    at_desk(refused)
    at_desk(cut, allow_auto_truncate=True)


def test_whole_numbers_may_be_written_with_a_point() -> None:
    async def use(desk: Desk) -> None:
        await desk.post("/v1/completions", prompt="a", max_tokens=3.0, n=2.0, temperature=1.5)
        sampling = desk.asked.sampling
        assert (sampling.max_new_tokens, sampling.temperature) == (3, 1.5) and len(desk.engine.requests) == 2
        error = (await desk.post("/v1/completions", 400, prompt="a", max_tokens=3.5))["error"]
        assert error["param"] == "max_tokens"

    at_desk(use)


def test_models() -> None:
    async def use(desk: Desk) -> None:
        models = await desk.get("/v1/models")
        assert models["object"] == "list" and [card["id"] for card in models["data"]] == ["tiny"]
        card = await desk.get("/v1/models/tiny")
        assert card["object"] == "model" and card["max_model_len"] == 512
        assert "tiny" in (await desk.get("/v1/models/org/other", 404))["error"]["message"]

    at_desk(use)


# Responses ------------------------------------------------------------------------------------------------------------


def test_a_response_is_stored_fetched_and_continued() -> None:
    async def use(desk: Desk) -> None:
        first = await desk.post("/v1/responses", input="hi", instructions="be brief", metadata={"a": "b"})
        assert first["object"] == "response" and first["status"] == "completed" and first["store"] is True
        assert first["output"][0]["content"][0]["text"] == "hello" and first["metadata"] == {"a": "b"}
        assert first["usage"]["output_tokens"] == 6 and first["usage"]["input_tokens_details"]["cached_tokens"] == 1
        assert await desk.get(f"/v1/responses/{first['id']}") == first
        second = await desk.post("/v1/responses", input="more", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        assert desk.engine.prompt_text(desk.engine.requests[-1]) == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
            "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
        )
        gone = await desk.post("/v1/responses", input="hi", store=False)
        assert gone["store"] is False
        await desk.get(f"/v1/responses/{gone['id']}", 404)
        assert "completed" in (await desk.post(f"/v1/responses/{first['id']}/cancel", 400))["error"]["message"]

    at_desk(use)


def test_a_streamed_response_ends_with_what_is_stored() -> None:
    async def use(desk: Desk) -> None:
        events = await desk.stream("/v1/responses", input="hi")
        final = events[-1]
        assert final["type"] == "response.completed"
        assert await desk.get(f"/v1/responses/{final['response']['id']}") == final["response"]

    at_desk(use)


def test_a_response_in_the_background_runs_on_and_can_be_cancelled() -> None:
    def script(request: Generate) -> Play:
        return None if request.rid == "slow" else HELLO

    async def use(desk: Desk) -> None:
        queued = await desk.post("/v1/responses", input="hi", background=True)
        assert queued["status"] == "queued" and queued["output"] == []
        while (found := await desk.get(f"/v1/responses/{queued['id']}"))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0)
        assert found["status"] == "completed" and found["output"][0]["content"][0]["text"] == "hello"

        slow = await desk.post("/v1/responses", input="hi", background=True, rid="slow")
        assert (await desk.get("/v1/responses/slow"))["status"] == "in_progress"
        cancelled = await desk.post("/v1/responses/slow/cancel")
        assert cancelled["status"] == "cancelled" and cancelled["id"] == slow["id"]
        assert any(isinstance(message, Abort) for message in desk.engine.sent)
        assert (await desk.post("/v1/responses/slow/cancel"))["status"] == "cancelled"

    at_desk(use, script)


def test_the_background_holds_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_BACKGROUND", 2)

    async def use(desk: Desk) -> None:
        for name in ("a", "b"):
            await desk.post("/v1/responses", input="hi", background=True, rid=name)
        refused = await desk.post("/v1/responses", 429, input="hi", background=True)
        assert refused["error"]["code"] == "rate_limit_exceeded"
        await desk.post("/v1/responses/a/cancel")
        for _ in range(3):
            await asyncio.sleep(0)  # its task ends
        await desk.post("/v1/responses", input="hi", background=True, rid="c")

    at_desk(use, lambda request: None)


def test_a_failure_in_the_background_is_kept() -> None:
    async def use(desk: Desk) -> None:
        made = await desk.post("/v1/responses", input="hi", background=True)
        while (found := await desk.get(f"/v1/responses/{made['id']}"))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0)
        assert found["status"] == "failed" and found["error"] == {"code": "invalid_prompt", "message": "Too long."}
        await desk.post("/v1/responses", 400, input="hi", previous_response_id=made["id"])

    at_desk(use, lambda request: FinishAbort("Too long.", 400))


def test_several_processes_store_nothing_and_say_so() -> None:
    async def use(desk: Desk) -> None:
        made = await desk.post("/v1/responses", input="hi")
        assert made["store"] is False
        assert "tokenizer-worker-num" in (await desk.get(f"/v1/responses/{made['id']}", 404))["error"]["message"]
        fields = {"background": True, "store": True, "previous_response_id": made["id"]}
        for name, value in fields.items():
            error = (await desk.post("/v1/responses", 400, input="a", **{name: value}))["error"]
            assert error["param"] == name and "tokenizer-worker-num" in error["message"]
        assert (await desk.post("/v1/responses", input="hi", store=False))["store"] is False

    at_desk(use, tokenizer_worker_num=2)


def a_record(id: str, text: str, *, ended: bool = True) -> Record:
    fields: dict[str, Any] = {"instructions": None, "previous_response_id": None, "max_output_tokens": None}
    response = ResponseObject(
        id=id,
        created_at=1,
        status="in_progress",
        background=False,
        model="tiny",
        metadata={},
        store=True,
        temperature=1.0,
        top_p=1.0,
        top_logprobs=0,
        text={},
        reasoning={},
        **fields,
    )
    record = Record(response, [{"role": "user", "content": text}])
    if ended:
        record.end(response)
    return record


def test_the_store_forgets_the_oldest_finished_responses() -> None:
    store = ResponseStore(max_responses=2, max_characters=10)
    store.add(a_record("running", "x", ended=False))
    for name in ("a", "b", "c"):
        store.add(a_record(name, "y"))
    assert len(store) == 2 and store.find("running") and store.find("c")
    store.add(a_record("long", "z" * 100))
    assert len(store) == 2 and store.find("running") and store.find("long")
    with pytest.raises(RequestError, match="in use"):
        store.add(a_record("running", "another"))
    assert store.find("running").messages == [{"role": "user", "content": "x"}]


def test_the_store_counts_what_responses_become() -> None:
    store = ResponseStore(max_responses=9, max_characters=10)
    first, second = a_record("a", "12345"), a_record("b", "1234", ended=False)
    store.add(first)
    store.add(second)
    assert len(store) == 2
    spoken = OutputMessage(id="m", status="completed", content=[OutputText(text="too much")])
    second.end(msgspec.structs.replace(second.response, output=[spoken]))
    store.update(second)
    assert len(store) == 1 and store.find("b") is second
    store.add(a_record("b", "123456"))
    store.add(a_record("c", "1234"))
    assert len(store) == 2, "a replaced response does not count"
    store.forget("b")
    store.add(a_record("d", "123456"))
    assert len(store) == 2, "nor does a forgotten one"
    store.update(first)
    assert len(store) == 2, "nor does one that was dropped"
