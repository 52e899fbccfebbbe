"""The native routes over a scripted engine."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.client.handle import EngineClient
from bough.client.outputs import RequestOutput
from bough.client.replicas import Replicas
from bough.core.control import Sleep, SwapWeights, Wake
from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.messages.outputs import Delta, Deltas, ReplicaLost
from bough.messages.requests import Control, Pause, StartProfile
from bough.server.app import App
from bough.server.native import info
from bough.server.protocols import all_endpoints
from bough.server.watchdog import Watchdog
from bough.tokenizer.chat_template import ChatTemplate
from tests.fakes.scripted_engine import IM_END, MEMORY
from tests.server.native_engine import NativeEngine, open_server

HELLO = [*b"hello", IM_END]


def events_of(text: str) -> list[Any]:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def ask(
    body: dict[str, Any] | bytes,
    play: Any = HELLO,
    path: str = "/generate",
    cuts: Sequence[int] | None = None,
    **settings: Any,
) -> httpx.Response:
    """One request to a fresh server."""

    async def go() -> httpx.Response:
        engine = NativeEngine(lambda message: play)
        engine.cuts = cuts
        async with open_server(engine, **settings) as http:
            return await http.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))

    return asyncio.run(go())


def test_an_output_has_sglangs_form() -> None:
    output = ask({"text": "ab", "rid": "r", "return_prompt_token_ids": True, "return_timings": True})
    body = output.json()
    assert body["text"] == "hello" and body["output_ids"] == HELLO
    meta = body["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r", 2, 6)
    assert meta["prompt_token_ids"] == [97, 98] and meta["finish_reason"] == {"type": "stop", "matched": IM_END}
    assert meta["timings"].keys() >= {"queue_s", "prefill_s", "time_to_first_token_s", "decode_s", "tokens_per_second"}
    assert "prefill;dur=" in output.headers["server-timing"]


def test_a_request_without_a_prompt_is_told_the_names_of_both() -> None:
    for body in ({}, {"text": "a", "input_ids": [97]}):
        assert ask(body).json()["error"]["message"] == "Give exactly one of text and input_ids."


def test_batches_samples_and_ids() -> None:
    assert [o["text"] for o in ask({"text": ["a", "b"]}).json()] == ["hello", "hello"]
    assert len(ask({"text": "a", "sampling_params": {"n": 3}}).json()) == 3
    assert ask({"input_ids": [[97], [98, 99]]}).json()[1]["meta_info"]["prompt_tokens"] == 2
    assert ask({"text": "a", "sampling_params": None, "stream": None, "rid": None}).status_code == 200


def test_streams_with_many_logprobs_have_fewer_events_and_the_same_end() -> None:
    play = [97] * 60 + [IM_END]
    wanted = {"text": "ab", "return_logprob": True, "sampling_params": {"max_new_tokens": 500}}
    for top, events in (
        (0, range(61, 62)),
        (399, range(20, 40)),
    ):  # each of the first 20 shows little, then each a tenth more
        body = {**wanted, "top_logprobs_num": top}
        *outputs, _ = events_of(ask({**body, "stream": True}, play).text)
        whole = ask(body, play).json()
        assert len(outputs) in events
        assert outputs[-1]["output_ids"] == whole["output_ids"] == play
        names = ("output_token_logprobs", "output_top_logprobs") if top else ("output_token_logprobs",)
        assert all(outputs[-1]["meta_info"][name] == whole["meta_info"][name] for name in names)


def test_streams_are_cumulative_and_end_with_done() -> None:
    *outputs, done = events_of(ask({"text": "ab", "stream": True}).text)
    assert done == "[DONE]" and [o["text"] for o in outputs] == ["h", "he", "hel", "hell", "hello", "hello"]
    assert outputs[-1]["output_ids"] == HELLO and "index" not in outputs[0]
    *outputs, _ = events_of(ask({"text": ["a", "b"], "stream": True}).text)
    assert {o["index"] for o in outputs} == {0, 1}
    for index in (0, 1):
        assert [o for o in outputs if o["index"] == index][-1]["text"] == "hello"


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=12), st.booleans(), st.sets(st.integers(0, 48)))
def test_any_chunking_of_a_stream_ends_in_the_answer_that_is_not_streamed(
    text: str, logprobs: bool, cuts: set[int]
) -> None:
    play = [*text.encode(), IM_END]
    body = {"text": "q", "return_logprob": logprobs, "top_logprobs_num": 2, "rid": "r"}
    whole = ask(body, play).json()
    *outputs, last, done = events_of(ask(body | {"stream": True}, play, cuts=tuple(cuts)).text)
    assert done == "[DONE]" and len(outputs) <= len([cut for cut in cuts if 0 < cut < len(play)])
    for earlier, later in itertools.pairwise([*outputs, last]):
        assert later["text"].startswith(earlier["text"]) and len(later["output_ids"]) > len(earlier["output_ids"])
    for output in (whole, last):
        output["meta_info"].pop("e2e_latency")
    assert last == whole


# Every field of SGLang's native request at its default, and those that its clients and routers add.
SGLANG_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("input_embeds", "image_data", "video_data", "audio_data", "modalities", "session_params")),
    **dict.fromkeys(("lora_path", "lora_id", "custom_logit_processor", "bootstrap_host", "bootstrap_port")),
    **dict.fromkeys(("bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "routed_dp_rank", "session_id")),
    **dict.fromkeys(("disagg_prefill_dp_rank", "data_parallel_rank", "conversation_id", "priority", "extra_key")),
    **dict.fromkeys(("routing_key", "custom_labels", "external_trace_header", "received_time", "mm_hashes")),
    **dict.fromkeys(("need_wait_for_mm_inputs", "num_items_assigned", "max_dynamic_patch", "min_dynamic_patch")),
    **dict.fromkeys(("image_max_dynamic_patch", "video_max_dynamic_patch", "stream_options", "model", "cache_salt")),
    **dict.fromkeys(("max_thinking_tokens", "images_config", "video_config", "encoder_urls", "mm_content_hashes")),
    **dict.fromkeys(("positional_embed_overrides", "multi_item_delimiter_indices", "http_worker_ipc")),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts", "require_reasoning", "background"), False),
    **dict.fromkeys(("no_logs", "return_bytes", "return_entropy", "return_flat_raw_top_logprobs"), False),
    "return_flat_raw_top_logprobs_b64": False,
    **dict.fromkeys(("return_sampling_mask", "use_audio_in_video", "return_prompt_token_ids", "ignore_eos"), False),
    **dict.fromkeys(("return_indexer_topk", "return_text_in_logprobs", "return_logprob", "stream"), False),
    "log_metrics": True,
    "routed_experts_start_len": 0,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
}
ASKING = {name: True for name, value in SGLANG_DEFAULTS.items() if value is False and name.startswith("return_")} | {
    "lora_id": "x",
    "background": True,
    "disagg_prefill_dp_rank": 1,
    "custom_labels": {"team": "a"},
    "use_audio_in_video": True,
}
BUILT = {"return_prompt_token_ids", "return_text_in_logprobs", "return_logprob"}
BUILT |= {"return_hidden_states", "return_routed_experts"}


def test_every_field_of_sglangs_is_accepted_at_its_default() -> None:
    output = ask({"text": "a", **SGLANG_DEFAULTS})
    assert output.status_code == 200 and "warnings" not in output.json()["meta_info"], output.text


@pytest.mark.parametrize("field", sorted(ASKING.keys() - BUILT))
def test_a_field_that_asks_for_an_unbuilt_feature_is_refused_by_name(field: str) -> None:
    answer = ask({"text": "a", field: ASKING[field]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert f"{field} is not supported" in answer.text


def test_hints_and_notes_are_accepted_whatever_they_say() -> None:
    hints = {"model": "x", "conversation_id": "c", "routing_key": "k", "received_time": 1.5, "modalities": ["image"]}
    hints |= {"session_id": "s", "mm_hashes": ["0f"], "mm_content_hashes": ["sha256:0f"]}
    output = ask({"text": "a", **hints, "stream_options": {"include_usage": True}, "data_parallel_rank": 0})
    assert output.status_code == 200 and "warnings" not in output.json()["meta_info"]


def test_unknown_fields_make_a_warning_unless_strict() -> None:
    for stream in (False, True):
        answer = ask({"text": ["a", "b"], "straem": True, "stream": stream})
        assert answer.status_code == 200
        outputs = events_of(answer.text)[:-1] if stream else answer.json()
        for output in outputs:
            assert output["meta_info"]["warnings"] == ["Unknown field 'straem' has no effect. Did you mean 'stream'?"]
    error = ask({"text": "a", "straem": True}, strict_fields=True).json()["error"]
    assert error["param"] == "straem" and "--strict-fields" in error["message"]
    assert "Did you mean 'stream'" in error["message"]


def test_a_top_level_ignore_eos_holds_where_the_sampling_does_not_say() -> None:
    async def go() -> list[bool]:
        engine = NativeEngine(lambda message: HELLO)
        async with open_server(engine) as http:
            sampling = [{}, {"ignore_eos": False}, None]
            body = {"text": ["a", "b", "c"], "ignore_eos": True, "sampling_params": sampling}
            assert (await http.post("/generate", json=body)).status_code == 200
            assert (await http.post("/generate", json={"text": "a", "ignore_eos": True})).status_code == 200
        return [message.sampling.ignore_eos for message in engine.requests]

    assert asyncio.run(go()) == [True, False, True, True]


def test_vllms_fields_that_change_an_answer_do_so_beside_the_sampling_parameters() -> None:
    async def go() -> list[Any]:
        engine = NativeEngine(lambda message: HELLO)
        async with open_server(engine) as http:
            named = {"min_tokens": 2, "skip_special_tokens": False, "include_stop_str_in_output": True}
            more = {"allowed_token_ids": [5, 7], "truncate_prompt_tokens": 2}
            body = {"input_ids": [1, 2, 3], **named, **more, "sampling_params": {"min_new_tokens": None}}
            assert (await http.post("/generate", json=body)).status_code == 200
            for name, value in (("prompt_logprobs", 3), ("prompt_logprobs", 0), ("disagg_prefill_dp_rank", 0)):
                refused = await http.post("/generate", json={"text": "a", name: value})
                assert refused.status_code == 400 and f"{name} is not supported" in refused.text
        return engine.requests

    (message,) = asyncio.run(go())
    sampling = message.sampling
    assert (sampling.min_new_tokens, sampling.skip_special_tokens, sampling.no_stop_trim) == (2, False, True)
    assert np.frombuffer(message.input_ids, dtype=np.int32).tolist() == [2, 3]
    assert sampling.logit_bias.keys() == {5, 7}


def test_requests_that_want_no_logs_or_metrics_get_none() -> None:
    class Seen:
        def __init__(self) -> None:
            self.rids: list[str] = []

        def arrived(self, answer: RequestOutput) -> None:
            self.rids.append(answer.prompt.rid)

        def ended(self, answer: RequestOutput) -> None:
            self.rids.append(answer.prompt.rid)

    class Meter:
        prompts: ClassVar[list[int]] = []

        def started(self, prompt: int, cached: int, queue_s: float) -> None:
            self.prompts.append(prompt)

        def http_requests(self, *_: Any) -> None: ...

        def first_token(self, *_: Any) -> None: ...

        def more_tokens(self, *_: Any) -> None: ...

        def ended(self, *_: Any, incomplete: bool) -> None: ...

    async def go() -> tuple[list[str], list[int]]:
        engine, seen = NativeEngine(lambda message: HELLO), Seen()
        engine.watchers.append(seen)
        engine.client.meter = Meter()
        async with open_server(engine) as http:
            for rid, options in (("quiet", {"no_logs": True}), ("uncounted", {"log_metrics": False})):
                body = {"text": "a" * len(rid), "rid": rid, **options}
                assert (await http.post("/generate", json=body)).status_code == 200
            return seen.rids, Meter.prompts

    assert asyncio.run(go()) == (["uncounted"] * 2, [len("quiet")])


def test_a_native_answer_that_the_context_will_cut_says_so() -> None:
    for limit in (511, 512, 513):  # the context is 512 tokens
        meta = ask({"text": "ab", "sampling_params": {"max_new_tokens": limit}}).json()["meta_info"]
        assert meta["warnings"] == [
            f"max_new_tokens is {limit}, but the prompt leaves 510 tokens of the context; the answer ends there."
        ]
    assert "warnings" not in ask({"text": "ab", "sampling_params": {"max_new_tokens": 510}}).json()["meta_info"]


def test_errors_have_sglangs_fields_at_the_top_level() -> None:
    body = ask({"text": "a", "lora_id": "x"}).json()
    assert (body["object"], body["code"], body["param"]) == ("error", 400, "lora_id")
    assert body["message"] == body["error"]["message"] and body["error"]["retryable"] is False


def test_a_stop_regex_is_named_with_what_it_matched() -> None:
    stopped = FinishStop("h.l", "hel")
    output = ask({"text": "a"}, stopped).json()
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": "h.l", "matched_text": "hel"}


def test_tools_are_part_of_a_tokenised_conversation() -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}

    async def go(**fields: Any) -> httpx.Response:
        engine = NativeEngine(lambda message: HELLO)
        engine.tokenizer.chat_template = ChatTemplate(
            "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}x{{ reasoning_effort }}"
        )
        async with open_server(engine) as http:
            body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
            return await http.post("/v1/tokenize", json=body)

    for fields, text in (
        ({}, "x"),
        ({"tools": [tool]}, "[now]x"),
        ({"tools": [tool], "tool_choice": "none"}, "x"),
        ({"reasoning_effort": "low"}, "xlow"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "xhigh"),
        ({"temperature": 0.5, "max_tokens": 3}, "x"),  # the rest of a chat's body
        ({"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "[now]x"),
    ):
        assert bytes(asyncio.run(go(**fields)).json()["tokens"]).decode() == text
    assert asyncio.run(go(tools=[tool], tool_choice="often")).status_code == 400
    refused = asyncio.run(go(messages=None, prompt="x", tools=[tool]))
    assert refused.status_code == 400 and "tools are a part of conversations" in refused.text


def test_a_used_id_is_refused_in_sglangs_words() -> None:
    message = ask({"text": ["a", "b"], "rid": ["x", "x"]}).json()["message"]
    assert "Duplicate request IDs detected within the request: 'x'" in message


@pytest.mark.parametrize("ids", [[[1], [300]], [300], [2**31 - 1]])
def test_an_unknown_id_fails_a_whole_batch(ids: list[Any]) -> None:
    answer = ask({"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": ids})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "token_ids_logprob"


def test_nested_ids_are_for_many_prompts() -> None:
    answer = ask({"text": "a", "return_logprob": True, "token_ids_logprob": [[1]]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "token_ids_logprob"


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "text", "exactly one of text and"),
        ({"text": "a", "input_ids": [1]}, "text", "one of text and input_ids"),
        ({"text": "a", "stream": "yes"}, "stream", "expected bool"),
        ({"text": "a", "sampling_params": {"top_p": 3}}, "top_p", r"\(0, 1\]"),
        ({"text": "a", "sampling_params": {"top_q": 3}}, "top_q", "Did you mean"),
        ({"text": "a", "sampling_params": {"custom_params": 5}}, "custom_params", "must be an object"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf", "give one of them"),
        ({"text": "a", "lora_path": 3}, "lora_path", "str"),
        ({"text": "a", "image_data": ["x"]}, "image_data", "takes no images; leave image_data out"),
        ({"input_ids": [1, "a"]}, "input_ids", "int"),
        ({"text": ["a"], "rid": ["x", "y"]}, "rid", "2 entries for 1"),
        ({"text": "a", "sampling_params": {"stop_regex": "(" * 2000 + ")" * 2000}}, "stop_regex", "less deeply"),
        ({"text": "a", "sampling_params": {"stop_regex": "|".join(map(str, range(9999)))}}, "stop_regex", "4096"),
        ({"text": "a", "sampling_params": {"stop": ["a"] * 129}}, "stop", "at most 128"),
        ({"text": "a", "sampling_params": [{"n": 2}] * 2}, "sampling_params", "2 entries for 1"),
        ({"text": ["a"] * 9000}, "text", "9000 prompts make more than 8192 requests"),
        ({"input_ids": [[1]] * 9000}, "input_ids", "9000 prompts make more than 8192 requests"),
        ({"input_ids": [1] * 262145}, "input_ids", "262145 tokens is longer than the model's context length of 512"),
        ({"input_ids": [[1]] * 9, "sampling_params": {"n": 1000}}, "input_ids", "8192 requests"),
        ({"text": []}, "text", "list of prompts is empty"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -7}, "logprob_start_len", "a prompt position"),
        ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num", "between 0 and 4096"),
        (
            {
                "input_ids": [[97] * 300] * 2,
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 4096,
            },
            "top_logprobs_num",
            "asks for 2458200 logprobs of the prompt's tokens; at most 2097152",
        ),
        ({"text": "a", "sampling_params": {"stop_token_ids": [1] * 262145}}, "stop_token_ids", "at most 262144"),
        (
            {"text": "a", "sampling_params": {"logit_bias": {str(i): 1 for i in range(262145)}}},
            "logit_bias",
            "262145 entries; at most 262144",
        ),
        ({"text": "a", "lora_path": [None, "x"]}, "lora_path", "2 entries for 1"),
        ({"text": "a", "input_embeds": [[0.0]]}, "text", "or input_embeds instead of both"),
        ({"input_embeds": [[0.0], [1.0, 2.0]]}, "input_embeds", "all of one length"),
        ({"text": "a", "return_routed_experts": [True, True]}, "return_routed_experts", "2 entries for 1"),
        (
            {"text": "a", "return_routed_experts": True, "return_hidden_states": True},
            "return_routed_experts",
            "cannot be had at once",
        ),
        ({"text": "a", "routed_experts_start_len": -1}, "routed_experts_start_len", "must be 0 to"),
        ({"text": "a", "routed_experts_start_len": [1, 1]}, "routed_experts_start_len", "2 entries for 1"),
        ({"input_ids": [1, 2], "routed_experts_start_len": 3}, "routed_experts_start_len", "tokens, got 3"),
        ({"text": "a", "session_params": {"id": "s", "place": 1}}, "session_params", "unknown field `place`"),
        ({"text": "a", "priority": -(2**63) - 1}, "priority", "priority"),
        (b"{", None, "not valid JSON"),
        (b'{"text": "\xff"}', None, "not valid JSON"),
        (b'{"text": NaN}', None, "not valid JSON"),
        (b'{"text": "\\ud800"}', "text", "text holds a lone surrogate"),
        (b'{"text": ["a", "\\udc00 a"]}', "text", r"text\[1\] holds a lone surrogate"),
        (b'{"\\udc00": "a"}', None, "The body holds a lone surrogate"),
        (b'{"text": "a", "sampling_params": {"top_p": 1e999}}', "top_p", "sampling_params.top_p is a number"),
        (b"[1]", None, "expected object"),
    ],
)
def test_what_cannot_be_served_is_a_400_with_its_field(body: Any, field: str | None, words: str) -> None:
    reply = ask(body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == 400 and not error["retryable"]
    assert error.get("param") == field
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(error["message"])


def test_a_wrong_choice_is_told_the_right_ones() -> None:
    error = ask({"mode": "zzz"}, path="/pause_generation").json()["error"]
    assert error["message"] == "mode must be one of 'abort', 'retract', 'in_place'; got 'zzz'."
    error = ask({"activities": ["GPU", "X"]}, path="/start_profile").json()["error"]
    assert error["message"].startswith("activities[1] must be one of 'CPU', ") and error["param"] == "activities"
    cook = {"model": "m", "max_tokens": 1, "messages": [{"role": "cook", "content": "a"}]}
    assert "must be one of" in ask(cook, path="/v1/messages").json()["error"]["message"]


def test_fields_of_unbuilt_features_may_ask_for_nothing() -> None:
    reply = ask({"text": "a", "lora_path": None, "image_data": [], "return_hidden_states": False, "session_params": {}})
    assert reply.status_code == 200
    nulls = {"lora_path": [None], "session_params": {"id": None, "rid": None}, "image_data": [[None], []]}
    assert ask({"text": "a", **nulls}).status_code == 200
    assert ask({"text": ["a", "b"], "return_hidden_states": [False, False]}).status_code == 200


def test_null_means_not_given_for_a_prompt_of_a_batch_too() -> None:
    lists = {
        "return_logprob": [False, None],
        "logprob_start_len": [0, None],
        "top_logprobs_num": [1, None],
        "token_ids_logprob": [[1, 2], None],
        "sampling_params": [{"max_new_tokens": 1}, None],
        "rid": ["a", None],
        "extra_key": ["k", None],
        "cache_salt": [None, "s"],
    }
    reply = ask({"text": ["a", "b"], **lists})
    assert reply.status_code == 200 and reply.json()[0]["meta_info"]["id"] == "a" != reply.json()[1]["meta_info"]["id"]


def test_an_engines_refusal_is_the_status_also_of_a_stream() -> None:
    full = FinishAbort("The queue is full.", 429, "QueueFullError")
    for stream in (False, True):
        reply = ask({"text": "a", "stream": stream}, full)
        assert reply.status_code == 429 and reply.headers["retry-after"] == "1"
        assert reply.json()["error"] | {} == {
            "message": "The queue is full.",
            "type": "QueueFullError",
            "code": 429,
            "retryable": True,
        }
    assert ask({"text": ["a", "b"]}, full).status_code == 429
    events = events_of(ask({"text": ["a", "b"], "stream": True}, full).text)
    assert [e["meta_info"]["finish_reason"]["type"] for e in events[:-1]] == ["abort", "abort"]


def test_an_engines_refusal_names_the_field_that_was_sent() -> None:
    refusal = FinishAbort("input_ids: token id 9 is outside.", field="input_ids")
    for prompt, field in (({"text": "a"}, "text"), ({"input_ids": [9]}, "input_ids")):
        for stream in (False, True):
            error = ask({**prompt, "stream": stream}, refusal).json()["error"]
            assert error["param"] == field and error["message"].startswith(f"{field}: token id 9")
    outputs = ask({"text": ["a", "b"], "stream": True}, refusal).text
    assert "outside" in outputs and '"field"' not in outputs


def test_a_body_over_the_limit_is_a_413() -> None:
    body = {"text": "a" * (1 << 20)}
    assert ask(body, max_body_mb=1).status_code == 413
    assert "--max-body-mb" in ask(body, max_body_mb=1).json()["error"]["message"]
    assert ask({"text": "a" * 1000}, max_body_mb=1).status_code == 200


def test_zero_new_tokens_only_fill_the_cache() -> None:
    output = ask({"text": "a", "sampling_params": {"max_new_tokens": 0}}, FinishLength(0)).json()
    assert output["text"] == "" and output["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_information() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: HELLO)
        async with open_server(engine, api_key="s3cret") as http:
            http.headers["x-api-key"] = "s3cret"
            for path in ("/model_info", "/get_model_info"):
                info = (await http.get(path)).json()
                assert info["model_path"] == "/models/tiny" and info["is_generation"] is True
            for path in ("/server_info", "/get_server_info"):
                reply = await http.get(path)
                assert reply.json()["page_size"] == 1 and "s3cret" not in reply.text
                announced = {"startup_time": {"load_weight": 1.5}, "memory_usage": MEMORY}
                (state,) = reply.json()["internal_states"]
                assert state | announced == state and reply.json() | announced == reply.json()
                assert (state["dp_size"], state["effective_max_running_requests_per_dp"]) == (1, 10)
            load = (await http.get("/v1/loads")).json()["loads"][0]
            assert (load["num_running_reqs"], load["token_usage"], load["cache_hit_rate"]) == (2, 0.5, 0.25)
            assert load["prefill_tokens_per_s"] is None  # nothing was computed yet
            assert (load["utilization"], load["max_running_requests"]) == (0.5, 10)
            sections = {
                "memory": {"weight_gb": 2.5, "kv_cache_gb": 3.5, "token_capacity": 100},
                "speculative": {"accept_length": 1.5, "accept_rate": 0.25},
                "queues": {"waiting": 1, "grammar": 0, "retracted": 1},
            }
            assert sections.items() <= load.items() and isinstance(load["memory"]["token_capacity"], int)
            for include in ("all", "core,all", "", "core, memory,spec,queues"):
                assert (await http.get(f"/v1/loads?include={include}")).json()["loads"] == [load]
            for include, kept in (("core", ()), ("spec", ("speculative",)), ("core,queues", ("queues",))):
                (some,) = (await http.get(f"/v1/loads?include={include}")).json()["loads"]
                assert some == load | {name: None for name in sections if name not in kept}
            for include in ("lora", "core,disagg", "Core"):
                refused = await http.get(f"/v1/loads?include={include}")
                assert refused.status_code == 400 and "include must be some of core, memory, spec" in refused.text
            engine.state["num_running_reqs"], engine.state["spec_verify_ct"] = 9, 0
            load = (await http.get("/v1/loads")).json()["loads"][0]
            assert load["utilization"] == 0.9 and load["speculative"] is None  # no drafts yet
            engine.state["num_running_reqs"] = 2
            brief = {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 50}
            assert (await http.get("/get_load")).json() == [brief]
            for path in ("/health", "/health_generate", "/ping", "/"):
                assert (await http.get(path)).json() == {"status": "ok"}
            assert (await http.head("/health")).status_code == 200

    asyncio.run(go())


def test_every_replica_shows_its_load_and_the_dead_their_reason() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: HELLO)
        engine.client = EngineClient(Replicas([engine, engine]), engine.tokenizer)
        async with open_server(engine, dp_size=2) as http:
            loads = (await http.get("/v1/loads")).json()
            assert loads["dp_rank_count"] == 2 and [load["dp_rank"] for load in loads["loads"]] == [0, 1]
            assert [load["dp_rank"] for load in (await http.get("/get_load")).json()] == [0, 1]
            page = (await http.get("/metrics")).text
            for rank in "01":
                assert re.search(rf'^bough:num_running_reqs{{[^}}]*dp_rank="{rank}"[^}}]*}} 2.0$', page, re.MULTILINE)
            assert page.count("# TYPE bough:num_running_reqs ") == 1
            info = (await http.get("/server_info")).json()
            assert [state["dp_rank"] for state in info["internal_states"]] == [0, 1] and info["dead_replicas"] == {}
            answer = await http.post("/generate", json={"text": "a", "routed_dp_rank": 1})
            assert answer.json()["meta_info"]["dp_rank"] == 1
            for route, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
                refused = await http.post(route, json={**body, "data_parallel_rank": 2})
                assert refused.status_code == 400 and "one of this engine's 2 replicas" in refused.text
            one = (await http.get("/v1/loads?dp_rank=1")).json()
            assert one["dp_rank_count"] == 2 and [load["dp_rank"] for load in one["loads"]] == [1]
            page = (await http.get("/v1/loads?dp_rank=1&format=prometheus")).text
            assert 'dp_rank="1"' in page and 'dp_rank="0"' not in page
            for wrong in ("2", "-1", "one", ""):
                refused = await http.get(f"/v1/loads?dp_rank={wrong}")
                assert refused.status_code == 400 and "0 to 1; got" in refused.text
            engine.busy = 1
            flushed = await http.post("/flush_cache")
            assert flushed.status_code == 400 and "Replica 0: busy Of the 2 replicas, 1 did it." in flushed.text
            engine.client.receive(ReplicaLost(0, "It was killed."))
            info = (await http.get("/server_info")).json()
            assert [state["dp_rank"] for state in info["internal_states"]] == [1]
            assert info["dead_replicas"] == {"0": "It was killed."}
            loads = (await http.get("/v1/loads")).json()
            assert loads["dp_rank_count"] == 1 and [load["dp_rank"] for load in loads["loads"]] == [1]
            assert (await http.get("/v1/loads?dp_rank=0")).json()["loads"] == []
            assert (await http.get("/health")).status_code == 200
            refused = await http.post("/generate", json={"text": "a", "routed_dp_rank": 0})
            assert refused.status_code == 503 and "It was killed. It was replica 0" in refused.text

    asyncio.run(go())


def test_loads_say_what_the_metrics_say() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: HELLO)
        engine.state["num_running_reqs"] = 0
        async with open_server(engine) as http:
            assert (await http.get("/v1/loads")).json()["loads"][0]["gen_throughput"] == 0.0
            page = (await http.get("/v1/loads", params={"format": "prometheus"})).text
            assert "bough:token_usage{" in page and "bough:num_requests_total" not in page
            assert set(page.splitlines()) <= set((await http.get("/metrics")).text.splitlines())
            refused = await http.get("/v1/loads", params={"format": "xml"})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "format"

    asyncio.run(go())


def test_a_full_queue_is_no_illness_while_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "LOOK_S", 0.01)
    full = FinishAbort("The queue is full.", 429, "QueueFullError")
    broken = FinishAbort("No.", 500, "InternalServerError")

    async def check(refusal: FinishAbort, tokens: bytes) -> int:
        engine = NativeEngine(lambda message: refusal if message.rid.startswith("HEALTH_CHECK") else None)
        async with open_server(engine) as http:
            checking = asyncio.ensure_future(http.get("/health_generate"))
            while not engine.requests:
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.03, engine.client.receive, Deltas([Delta(7, "", tokens)]))
            return (await checking).status_code

    assert asyncio.run(check(full, b"\0\0\0\0")) == 200
    assert asyncio.run(check(broken, b"\0\0\0\0")) == 503
    monkeypatch.setattr(info, "HEALTH_TIMEOUT_S", 0.1)
    assert asyncio.run(check(full, b"")) == 503


def test_a_ping_tells_of_an_engine_that_is_stuck() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: HELLO)
        watchdog = Watchdog(engine.client, 60.0, lambda: None)
        context = dataclasses.replace(engine.context(api_key="s3cret"), watchdog=watchdog)
        app = App(all_endpoints(context), context.settings.server)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bough") as http:
            assert [(await http.get(path)).status_code for path in ("/health", "/ping", "/")] == [200, 200, 200]
            watchdog.stuck = True
            assert [(await http.get(path)).status_code for path in ("/health", "/ping", "/")] == [503, 503, 200]

    asyncio.run(go())


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokens(prefix: str) -> None:
    assert ask({"prompt": "ab"}, path=f"{prefix}/tokenize").json() == {
        "tokens": [97, 98],
        "count": 2,
        "max_model_len": 512,
    }
    assert ask({"prompt": ["a", ""], "model": "x"}, path=f"{prefix}/tokenize").json()["count"] == [1, 0]
    assert ask({"tokens": [97, 98, IM_END]}, path=f"{prefix}/detokenize").json() == {"text": "ab"}
    assert ask({"tokens": [[97], [98]]}, path=f"{prefix}/detokenize").json() == {"text": ["a", "b"]}
    many = ask({"prompt": ["a"] * 8193}, path=f"{prefix}/tokenize")
    assert many.status_code == 400 and "8193 texts; at most 8192" in many.text
    many = ask({"tokens": [[97] * (1 << 19), [97] * (1 << 19), [97]]}, path=f"{prefix}/detokenize")
    assert many.status_code == 400 and "1048577 ids; at most 1048576" in many.text
    for body in ({"tokens": [9999]}, {"tokens": [[1], 2]}, {"tokens": "a"}, {}):
        assert ask(body, path=f"{prefix}/detokenize").status_code == 400


def test_a_conversation_is_tokenised_as_a_chat_would_be() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = ask({"messages": messages}, path="/tokenize").json()["tokens"]
    chat = ask({"model": "any", "messages": messages, "max_tokens": 1}, path="/v1/chat/completions").json()
    assert len(ids) == chat["usage"]["prompt_tokens"]
    bare = ask({"messages": messages, "add_generation_prompt": False}, path="/tokenize").json()["tokens"]
    assert ids[: len(bare)] == bare and len(ids) > len(bare)
    begun = {"messages": [*messages, {"role": "assistant", "content": "Hel"}], "continue_final_message": True}
    chat = ask({"model": "any", **begun, "max_tokens": 1}, path="/v1/chat/completions").json()
    assert ask(begun, path="/tokenize").json()["count"] == chat["usage"]["prompt_tokens"]
    for body in ({}, {"prompt": "a", "messages": messages}, {"messages": []}, {"messages": [{"role": "nobody"}]}):
        assert ask(body, path="/tokenize").status_code == 400


def test_management() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: None if message.rid == "job" else HELLO)
        async with open_server(engine) as http:
            engine.busy = 1
            assert (await http.post("/flush_cache")).status_code == 400
            engine.busy = 2
            assert (await http.get("/flush_cache", params={"timeout": 9})).json()["success"] is True
            assert (await http.get("/flush_cache", params={"timeout": "soon"})).json()["error"]["param"] == "timeout"
            for path in ("/hicache/storage-backend/clear", "/clear_hicache_storage_backend"):
                assert (await http.post(path)).status_code == 200
                assert (engine.commands[-1].action, engine.commands[-1].settings) == ("clear", {})
            assert (await http.post("/pause_generation", json={"mode": "retract"})).status_code == 200
            assert (await http.post("/pause_generation")).status_code == 200
            assert [c.mode for c in engine.commands if isinstance(c, Pause)] == ["retract", "abort"]
            assert (await http.post("/pause_generation", json={"mode": "now"})).json()["error"]["param"] == "mode"
            assert (await http.post("/continue_generation")).status_code == 200
            assert (await http.post("/start_profile", json={"num_steps": 3})).status_code == 200
            assert (await http.get("/stop_profile")).status_code == 200
            of_sglangs_benchmark = {"num_steps": "5", "start_step": "0", "profile_stages": None, "profile_prefix": None}
            assert (await http.post("/start_profile", json=of_sglangs_benchmark)).status_code == 200
            assert [c.num_steps for c in engine.commands if isinstance(c, StartProfile)] == [3, 5]
            for field, wrong in (("num_steps", "0"), ("start_step", "-1"), ("profile_stages", ["decode"])):
                assert field in (await http.post("/start_profile", json={field: wrong})).json()["error"]["message"]
            waiting = asyncio.ensure_future(http.post("/generate", json={"text": "a", "rid": "job"}))
            while not engine.requests:
                await asyncio.sleep(0)
            assert (await http.post("/abort_request", json={})).status_code == 400
            assert (await http.post("/abort_request", json={"rid": "job"})).status_code == 200
            assert (await waiting).json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert (await http.get("/pause_generation")).status_code == 405
            assert (await http.get("/nowhere")).json()["error"]["code"] == 404

    asyncio.run(go())


def test_a_store_is_attached_and_detached() -> None:
    async def go() -> None:
        engine, path = NativeEngine(lambda message: HELLO), "/hicache/storage-backend"
        async with open_server(engine) as http:
            shown = (await http.get(path)).json()
            assert shown["hicache_storage_backend"] is None and shown["hicache_write_policy"] == "write_through"
            body = {"hicache_storage_backend": "file", "hicache_write_policy": None}
            body |= {"hicache_storage_backend_extra_config_json": '{"max_bytes": 5}'}
            body |= {"hicache_storage_prefetch_policy": "wait-complete"}
            assert (await http.put(path, json=body)).json() == {"success": True, "message": "done"}
            given = {
                "hicache_storage_backend": "file",
                "hicache_storage_backend_extra_config": '{"max_bytes": 5}',
                "hicache_storage_prefetch_policy": "wait_complete",
            }
            assert (engine.commands[-1].action, engine.commands[-1].settings) == ("attach", given)
            await http.put(path, json=body | {"hicache_storage_backend_extra_config_json": {"max_bytes": 5}})
            assert engine.commands[-1].settings == given
            engine.state |= {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"}
            engine.state["hicache_write_policy"] = "write_through"
            assert (await http.get(path)).json()["hicache_storage_backend"] == "file"
            assert (await http.delete(path)).status_code == 200 and engine.commands[-1].action == "detach"
            sent = len(engine.commands)
            for field, value in (
                ("hicache_storage_backend", "hf3fs"),
                ("hicache_storage_backend", None),
                ("hicache_write_policy", "now"),
                ("hicache_ratio", 2.0),
            ):
                answer = await http.put(path, json=body | {field: value})
                assert answer.status_code == 400 and field in answer.text, answer.text
            assert len(engine.commands) == sent
        async with open_server(engine, api_key="k") as http:
            for ask in (http.put, http.delete):
                answer = await ask(path, headers={"Authorization": "Bearer k"})
                assert answer.status_code == 403, "a store reads paths, and gets the prompts of all"

    asyncio.run(go())


def test_choices_of_experts_are_told_as_json() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: HELLO)
        path = "/{}_expert_distribution_record"
        async with open_server(engine) as http:
            for action, ask in itertools.product(("start", "stop"), (http.get, http.post)):
                assert (await ask(path.format(action))).json() == {"success": True, "message": "done"}
            for ask in (http.get, http.post):
                assert (await ask(path.format("dump"))).json() == {"logical_count": [[3, 1], [0, 4]]}
            commands = [c for c in engine.commands if isinstance(c, Control)]
            assert [c.command.action for c in commands] == ["start"] * 2 + ["stop"] * 2 + ["dump"] * 2
            assert all(c.wait for c in commands)
            engine.busy = 1
            refused = await http.post(path.format("dump"))
            assert refused.status_code == 400 and refused.json()["error"]["message"] == "busy"

    asyncio.run(go())


def test_a_profiles_folder_is_the_operators_to_choose() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: HELLO)
        body = {"output_dir": "/somewhere"}
        async with open_server(engine, api_key="k") as http:
            refused = await http.post("/start_profile", json=body, headers={"x-api-key": "k"})
            assert refused.status_code == 403 and "--admin-api-key" in refused.json()["error"]["message"]
            assert (await http.post("/start_profile", headers={"x-api-key": "k"})).status_code == 200
        async with open_server(engine, api_key="k", admin_api_key="a") as http:
            assert (await http.post("/start_profile", json=body, headers={"x-api-key": "a"})).status_code == 200
        async with open_server(engine) as http:
            assert (await http.post("/start_profile", json=body)).status_code == 200
        folders = [c.command.output_dir for c in engine.commands if isinstance(c, StartProfile)]
        assert folders == [None, "/somewhere", "/somewhere"]

    asyncio.run(go())


def test_weights_and_memory_are_commands_for_the_engine() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: HELLO)
        async with open_server(engine) as http:
            body = {"model_path": "/new", "load_format": "safetensors", "weight_version": "7", "keep_pause": False}
            reply = await http.post("/update_weights_from_disk", json=body)
            assert reply.json() == {"success": True, "message": "done", "num_paused_requests": 0}
            await http.post(
                "/update_weights_from_disk", json={"model_path": "b", "flush_cache": False, "abort_all_requests": True}
            )
            for tags in (None, [], ["kv_cache"], ["weights"]):
                for path in ("/release_memory_occupation", "/resume_memory_occupation"):
                    assert (await http.post(path, json={"tags": tags})).json() == {"success": True, "message": "done"}
            commands = [c for c in engine.commands if isinstance(c, Control)]
            for path in ("/release_memory_occupation", "/resume_memory_occupation"):
                assert (await http.get(path)).json() == {"success": True, "message": "done"}
            update, other, *memory = commands
            assert update.command == SwapWeights("/new", "safetensors")
            assert (update.wait, update.flush_cache, update.abort_all) == (True, True, False)
            assert update.facts == {"model_path": "/new", "weight_version": "7"}
            assert (other.flush_cache, other.abort_all, other.facts) == (False, True, {"model_path": "b"})
            both, cache, weights = ("weights", "kv_cache"), ("kv_cache",), ("weights",)
            expected = [kind(tags) for tags in (both, both, cache, weights) for kind in (Sleep, Wake)]
            assert [c.command for c in memory] == expected and not any(c.wait for c in memory)
            assert [c.flush_cache for c in memory] == [True, False, True, False, True, False, False, False]
            engine.busy = 2
            refused = await http.post("/update_weights_from_disk", json={"model_path": "b"})
            assert refused.status_code == 400 and refused.json()["success"] is False
            assert refused.json()["message"] == refused.json()["error"]["message"] == "busy"
            assert (await http.post("/release_memory_occupation")).status_code == 400
            for wrong in ({}, {"model_path": 3}, {"model_path": "b", "model_pth": ""}):
                assert (await http.post("/update_weights_from_disk", json=wrong)).status_code == 400
            wrong = await http.post("/release_memory_occupation", json={"tags": ["graphs"]})
            assert wrong.status_code == 400 and "tags" in wrong.json()["error"]["param"]
            engine.state |= {"model_path": "/new", "weight_version": "7"}
            info = (await http.get("/get_model_info")).json()
            assert (info["model_path"], info["weight_version"]) == ("/new", "7")

    asyncio.run(go())


@pytest.mark.parametrize(
    "path", ["/update_weights_from_disk", "/release_memory_occupation", "/resume_memory_occupation"]
)
@pytest.mark.parametrize(
    ("keys", "sent", "status"),
    [
        ({}, None, 200),
        ({"api_key": "k"}, "k", 403),
        ({"api_key": "k"}, None, 403),
        ({"api_key": "k", "admin_api_key": "a"}, "k", 401),
        ({"api_key": "k", "admin_api_key": "a"}, "a", 200),
        ({"admin_api_key": "a"}, None, 401),
    ],
)
def test_weights_and_memory_are_never_a_clients(path: str, keys: dict[str, str], sent: str | None, status: int) -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: HELLO)
        async with open_server(engine, **keys) as http:
            body = {"model_path": "x"} if "weights" in path else {}
            reply = await http.post(path, json=body, headers={} if sent is None else {"x-api-key": sent})
            assert reply.status_code == status and len(engine.commands) == (status == 200)
            if status == 403:
                assert "--admin-api-key" in reply.json()["error"]["message"]

    asyncio.run(go())
