"""From OpenAI's requests to the engine's: names, defaults, ranges, and what is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from bough.core.errors import RequestError
from bough.core.sampling_params import MAX_STOPS, SamplingParams
from bough.server.errors import failure_of, set_field_names
from bough.server.messages import read_messages
from bough.server.openai.chat import read_chat
from bough.server.openai.completions import read_completion
from bough.server.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Identity,
    ResponsesRequest,
    check_request,
    use_openai_names,
)
from bough.server.openai.response_items import read_input
from bough.server.openai.responses import read_response_request, with_instructions
from tests.fakes.scripted_engine import ScriptedEngine

ME = Identity("cmpl-1", 1, "tiny")
HELLO = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "x", **fields}, CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": HELLO, **fields}, ChatRequest)


def response(**fields: Any) -> ResponsesRequest:
    return msgspec.convert({"input": "x", **fields}, ResponsesRequest)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_new_tokens": 16}),
        ({"max_tokens": None, "temperature": None, "stop": None}, {"max_new_tokens": 16}),
        ({"max_tokens": 0}, {"max_new_tokens": 0}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"temperature": 0, "top_p": 0.5, "top_k": 3}),
        ({"seed": 5, "min_tokens": 2}, {"sampling_seed": 5, "min_new_tokens": 2}),
        ({"logit_bias": {"17": -100}}, {"logit_bias": {17: -100.0}}),
        ({"stop": "a"}, {"stop": ("a",)}),
        (
            {"stop": ["a", "b"], "stop_token_ids": [3], "stop_regex": "[0-9]"},
            {"stop": ("a", "b"), "stop_token_ids": (3,)},
        ),
        ({"n": 3}, {"n": 3}),
        ({"n": 2, "best_of": 4}, {"n": 4}),
        ({"ignore_eos": True, "no_stop_trim": True, "skip_special_tokens": False}, {"ignore_eos": True}),
        ({"frequency_penalty": 1, "presence_penalty": -2, "repetition_penalty": 1.5}, {"presence_penalty": -2.0}),
    ],
)
def test_completion_fields_become_sampling_parameters(given: dict[str, Any], expected: dict[str, Any]) -> None:
    sampling = SamplingParams.parse(read_completion(completion(**given), ME)["sampling_params"])
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", {"prompt": "a"}),
        (["a", "b"], {"prompt": ["a", "b"]}),
        ([1, 2], {"input_ids": [1, 2]}),
        ([[1], [2, 3]], {"input_ids": [[1], [2, 3]]}),
    ],
)
def test_prompts_of_all_four_forms(prompt: Any, expected: dict[str, Any]) -> None:
    read = read_completion(completion(prompt=prompt), ME)
    assert {name: read[name] for name in ("prompt", "input_ids") if name in read} == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], 2]])
def test_empty_and_mixed_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_completion(completion(prompt=prompt), ME)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (False, -1, 0)),
        ({"logprobs": 0}, (True, -1, 0)),
        ({"logprobs": 3, "echo": True}, (True, 0, 3)),
        ({"echo": True}, (False, -1, 0)),
        ({"best_of": 2}, (True, -1, 0)),
        ({"prompt_logprobs": 0}, (True, 0, 0)),
        ({"prompt_logprobs": 2, "logprobs": 3}, (True, 0, 3)),
        ({"prompt_logprobs": 4, "logprobs": 3}, (True, 0, 4)),
    ],
)
def test_which_logprobs_a_completion_needs(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    read = read_completion(completion(**given), ME)
    assert (read["return_logprob"], read["logprob_start_len"], read["top_logprobs_num"]) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 512),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 0}, 0),
    ],
)
def test_a_chat_without_a_limit_may_use_the_whole_context(given: dict[str, Any], expected: int) -> None:
    assert read_chat(chat(**given), ME, 512)["sampling_params"]["max_new_tokens"] == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e7),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("n", 0),
        ("n", 5000),
        ("best_of", 0),
        ("logprobs", 5000),
        ("logprobs", -1),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("suffix", "end"),
    ],
)
def test_completion_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(completion(**{field: value}))
    assert caught.value.field == field and field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_logprobs", 5000),
        ("max_completion_tokens", -1),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("return_sampling_mask", True),
    ],
)
def test_chat_values_that_cannot_be_served_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(chat(**{field: value}))
    assert caught.value.field == field and field in caught.value.message


def test_clients_of_sglang_may_go_beyond_openais_ranges() -> None:
    check_request(completion(temperature=2.5, logprobs=50))
    check_request(chat(temperature=2.5, logprobs=True, top_logprobs=50))


def test_unbuilt_fields_are_accepted_at_their_defaults() -> None:
    check_request(
        chat(
            tools=[],
            tool_choice="auto",
            response_format={"type": "text"},
            modalities=["text"],
            return_hidden_states=False,
            regex=None,
            session_params={"id": None},
            session_id="a label",
            lora_path=[None],
            logprobs=True,
        )
    )
    check_request(completion(suffix="", prompt="a prompt is not a stored one", lora_path=None))
    check_request(response(n=1, input_ids=[], response_format={"type": "text"}, return_hidden_states=False))


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 2, "stream": True}, "best_of")],
)
def test_best_of_needs_room_and_no_stream(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_completion(completion(**fields), ME)
    assert caught.value.field == field


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(RequestError) as caught:
        read_chat(chat(top_logprobs=2), ME, 512)
    assert caught.value.field == "top_logprobs"


def test_errors_speak_of_the_fields_that_the_client_sent() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.parse(read_completion(completion(max_tokens=2, min_tokens=5), ME)["sampling_params"])
    use_openai_names(completion())
    failure = failure_of(caught.value)
    set_field_names({})
    assert (failure.field, failure.message) == ("min_tokens", "min_tokens (5) is larger than max_tokens (2).")


# Messages -------------------------------------------------------------------------------------------------------------


def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    read = read_messages([{"role": "developer", "content": parts}, {"role": "assistant", "content": None, "name": "x"}])
    assert read == [{"role": "system", "content": "a\nb"}, {"role": "assistant", "content": "", "name": "x"}]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
    ],
)
def test_messages_that_cannot_be_read_are_refused_by_name(message: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages([message])
    assert caught.value.field == field


def test_no_messages_are_refused() -> None:
    nothing: tuple[Any, ...] = (None, [])
    for given in nothing:
        with pytest.raises(RequestError, match="messages is empty"):
            read_messages(given)


def test_rendering_with_the_models_template() -> None:
    engine = ScriptedEngine(lambda request: None)
    context = engine.context()

    def text(**options: Any) -> str:
        messages = [{"role": "user", "content": "hi 😀"}, {"role": "assistant", "content": "He"}]
        ids, rendered, _ = asyncio.run(context.render(messages, **options))
        assert engine.tokenizer.decode(ids, skip_special_tokens=False) == rendered
        return rendered

    turns = "<|im_start|>user\nhi 😀<|im_end|>\n<|im_start|>assistant\nHe"
    assert text() == turns + "<|im_end|>\n<|im_start|>assistant\n"
    assert text(variables={"mood": "gay"}).endswith("assistant\n(gay)")
    assert text(add_generation_prompt=False) == turns + "<|im_end|>\n"
    assert text(continue_final_message=True) == turns
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(RequestError, match=name):
            text(variables={name: True})


# Responses ------------------------------------------------------------------------------------------------------------


def test_response_input_becomes_messages() -> None:
    assert read_input("hi") == [{"role": "user", "content": "hi"}]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    ]
    assert read_input(items) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert with_instructions("be brief", read_input("hi"))[0] == {"role": "system", "content": "be brief"}
    assert with_instructions(None, read_input("hi")) == read_input("hi")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"session_params": {"id": "1"}}, "session_params"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"input_ids": [1]}, "input_ids"),
    ],
)
def test_responses_that_cannot_be_made_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_response_request(response(**fields), ME, 512)
    assert caught.value.field == field


def test_items_that_are_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="'computer_call'"):
        read_input([{"type": "computer_call", "name": "f"}])
