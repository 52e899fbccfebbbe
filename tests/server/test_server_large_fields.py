"""Fields with very many entries: they are refused by their number alone, or read in a thread, so that other requests go
on; and what all requests of a call share is not sent without end."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest

from bough.client import inputs
from bough.client.inputs import InputReader, Inputs
from bough.core.sampling_params import SamplingParams
from bough.server import context, messages
from bough.tokenizer.tokenizer import Tokenizer
from tests.fakes.scripted_engine import IM_END
from tests.server.native_engine import NativeEngine, open_server

VOCABULARY = 258
TURNS = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def ask(path: str, body: dict[str, Any]) -> tuple[Any, NativeEngine]:
    async def go() -> Any:
        engine = NativeEngine(lambda message: [*b"hello", IM_END])
        async with open_server(engine) as http:
            return await http.post(path, json=body), engine

    return asyncio.run(go())


def table(entries: int) -> dict[str, float]:
    return {str(token): 1.0 for token in range(entries)}


def routes(name: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    native = {"sampling_params": {name: value}} if name == "logit_bias" else {name: value}
    return [
        ("/generate", {"text": "a", **native}),
        ("/v1/completions", {"prompt": "a", name: value}),
        ("/v1/chat/completions", {**TURNS, name: value}),
    ]


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
@pytest.mark.parametrize("route", [0, 1, 2])
def test_a_table_has_no_more_entries_than_the_vocabulary(
    name: str, route: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(entries: int) -> tuple[str, dict[str, Any]]:
        return routes(name, table(entries) if name == "logit_bias" else list(range(entries)))[route]

    assert ask(*of(VOCABULARY))[0].status_code == 200
    monkeypatch.setattr(InputReader, "read", None)  # nobody looks at the entries
    answer, engine = ask(*of(VOCABULARY + 1))
    assert answer.status_code == 400 and not engine.requests
    error = answer.json()["error"]
    assert error["param"] == name
    assert error["message"] == f"{name} has 259 entries, and the model has 258 tokens; give each token once."


def test_each_table_of_a_batch_is_counted() -> None:
    given = [None, {"logit_bias": table(VOCABULARY + 1)}]
    answer, engine = ask("/generate", {"text": ["a", "b"], "sampling_params": given})
    assert answer.status_code == 400 and "259 entries" in answer.text and not engine.requests


@pytest.mark.parametrize("route", [0, 1, 2])
def test_a_large_body_is_read_in_a_thread(route: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    read = InputReader.read

    def noted(reader: InputReader, **given: Any) -> Inputs:
        threads.append(threading.current_thread())
        return read(reader, **given)

    monkeypatch.setattr(InputReader, "read", noted)
    for length in (1, 100_000):
        assert ask(*routes("user", "x" * length)[route])[0].status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/v1/chat/completions", "messages", {"max_tokens": 2}),
        ("/v1/responses", "input", {}),
        ("/v1/messages", "messages", {"max_tokens": 2}),
        ("/v1/messages/count_tokens", "messages", {}),
        ("/api/chat", "messages", {}),
        ("/v1/tokenize", "messages", {}),
    ],
)
def test_a_long_conversation_is_read_in_a_thread(
    path: str, field: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    read = messages.read_message

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return read(*given)

    monkeypatch.setattr(messages, "read_message", noted)
    ask(path, {field: [{"role": "user", "content": "a"}], **more})
    short = len(threads)
    ask(path, {field: [{"role": "user", "content": "x" * 1000}] * 100, **more})
    on_loop = [thread is threading.main_thread() for thread in threads]
    assert short and all(on_loop[:short]) and len(on_loop) > short and not any(on_loop[short:])


def test_long_arguments_of_calls_stay_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_ARGUMENTS", 10)
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', '{"a": 12345}')]
    (turn,) = messages.read_messages([{"role": "assistant", "tool_calls": calls}])
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{"a": 1}, '{"a": 12345}']


def test_a_whole_table_is_converted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.core.sampling_params._is_token_key", None)  # looks at one entry
    assert SamplingParams.parse({"logit_bias": {"3": 1, "5": -1.5}}).logit_bias == {3: 1.0, 5: -1.5}


@pytest.mark.parametrize(
    "shared",
    [
        {"sampling_params": {"logit_bias": table(200)}},
        {"sampling_params": {"json_schema": '{"type": "string", "description": "%s"}' % ("x" * 20_000)}},
        {"sampling_params": {"custom_params": {"a": ["x" * 10_000] * 2}}},
        {"bad_words": ["word"] * 10 + ["wörter" * 10]},
        {"allowed_token_ids": list(range(200))},
    ],
)
@pytest.mark.parametrize("many", [{"text": ["a"] * 8}, {"text": "a", "sampling_params": {"n": 8}}])
def test_what_requests_share_is_bounded_as_often_as_it_is_sent(
    shared: dict[str, Any], many: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "MAX_SENT_BYTES", 20_000)
    sampling = {**shared.get("sampling_params", {}), **many.get("sampling_params", {}), "max_new_tokens": 2}
    alone, engine = ask("/generate", {**shared, "text": "a", "sampling_params": sampling | {"n": 1}})
    assert alone.status_code == 200 and len(engine.requests) == 1
    refused, engine = ask("/generate", {**shared, **many, "sampling_params": sampling})
    assert refused.status_code == 400 and not engine.requests
    assert "8 requests with sampling parameters of" in refused.text and "send several" in refused.text


@pytest.mark.parametrize("name", ["rid", "extra_key", "cache_salt", "lora_path", "bootstrap_host"])
def test_names_that_every_request_carries_are_short(name: str) -> None:
    answer, engine = ask("/generate", {"text": ["a"] * 3, name: "x" * 4097})
    assert answer.status_code == 400 and not engine.requests
    assert answer.json()["error"]["message"] == f"{name} has 4097 characters; at most 4096 are taken."


def test_a_session_has_a_short_name() -> None:
    answer, engine = ask("/generate", {"text": "a", "session_params": {"id": "x" * 4097}})
    assert answer.status_code == 400 and "session_params has 4097 characters" in answer.text and not engine.requests


def test_ids_of_logprobs_are_counted_before_they_are_read() -> None:
    answer, _ = ask("/generate", {"text": "a", "return_logprob": True, "token_ids_logprob": [-5] * 4097})
    assert answer.status_code == 400 and "token_ids_logprob has 4097 entries; at most 4096" in answer.text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a"] * 4097, "bad_words has 4097 entries; at most 4096 are taken."),
        (["x" * 1000] * 66, "bad_words has 66000 characters; all its words together may have 65536."),
    ],
)
def test_bad_words_are_few_and_written_as_tokens_at_once(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, engine = ask("/generate", {"text": "a", "bad_words": words})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == told and not engine.requests
    calls: list[int] = []
    encode = Tokenizer.encode_batch

    def noted(tokenizer: Tokenizer, texts: Any, *args: Any, **options: Any) -> Any:
        calls.append(len(texts))
        return encode(tokenizer, texts, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", noted)
    assert ask("/generate", {"text": "a", "bad_words": [f"w{i}" for i in range(50)]})[0].status_code == 200
    assert calls == [100]


def test_what_prompts_share_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"check_patterns": 0, "_logprob_request": 0}
    for name in counts:
        check = getattr(inputs, name)

        def counted(*given: Any, name: str = name, check: Any = check) -> Any:
            counts[name] += 1
            return check(*given)

        monkeypatch.setattr(inputs, name, counted)
    sampling = [{"stop_regex": [f"a{i}"]} for i in range(20)]
    asked = {"return_logprob": True, "token_ids_logprob": [1, 2]}
    answer, engine = ask("/generate", {"text": ["a"] * 20, "sampling_params": sampling, **asked})
    assert answer.status_code == 200 and counts == {"check_patterns": 1, "_logprob_request": 1}
    assert {message.logprobs.ids for message in engine.requests if message.logprobs is not None} == {(1, 2)}
    starts = [0 if i % 2 else -1 for i in range(20)]
    _, engine = ask("/generate", {"text": ["a"] * 20, "logprob_start_len": starts, **asked})
    assert [message.logprobs.start for message in engine.requests if message.logprobs is not None] == starts


def test_patterns_of_many_prompts_are_counted_before_the_next_is_compiled() -> None:
    sampling = [{"stop_regex": ["a" * 3000]}, {"stop_regex": ["b" * 3000]}, {"stop_regex": ["("]}]
    answer, _ = ask("/generate", {"text": ["a"] * 3, "sampling_params": sampling})
    assert answer.status_code == 400 and "stop_regex has 6000 characters" in answer.text


def test_a_long_name_is_like_no_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difflib.get_close_matches", None)  # quadratic
    answer, _ = ask("/generate", {"text": "a", "sampling_params": {"x" * 10_000: 1}})
    assert answer.status_code == 400 and len(answer.text) < 2000 and f"'{'x' * 100}'" in answer.text


@pytest.mark.parametrize("given", [[None] * 1002, {str(i): None for i in range(1002)}])
def test_a_field_without_effect_is_not_searched_without_end(given: Any) -> None:
    answer, _ = ask("/generate", {"text": "a", "custom_labels": given})
    assert answer.status_code == 400 and "custom_labels is not supported" in answer.text
    assert ask("/generate", {"text": "a", "custom_labels": [None, {"a": None}]})[0].status_code == 200


def test_resumed_ids_are_counted_first() -> None:
    resume = {"output_ids": [[1]] * 262145}
    answer, _ = ask("/generate", {"text": "a", "stream": True, "resume": resume})
    assert answer.status_code == 400 and "resume.output_ids has 262145 entries" in answer.text


@pytest.mark.parametrize(("path", "field"), [("/v1/score", "items"), ("/v1/rerank", "documents")])
def test_a_query_is_not_repeated_without_end(path: str, field: str) -> None:
    labels = {"label_token_ids": [1]} if field == "items" else {}
    answer, _ = ask(path, {"query": "a", field: ["b"] * 65537, **labels})
    assert answer.status_code == 400 and f"{field} has 65537 entries; at most 65536" in answer.text
    answer, _ = ask(path, {"query": "a" * 10_000, field: ["b"] * 8000, **labels})
    assert (
        answer.status_code == 400
        and f"query has 10000 characters or ids and is read with each of 8000 {field}" in answer.text
    )


def test_logprobs_of_all_answers_together_are_bounded() -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 256, "sampling_params": {"max_new_tokens": 1}}
    answer, engine = ask("/generate", {"text": ["a"] * 1100, **asked})
    assert answer.status_code == 400 and not engine.requests
    told = r"top_logprobs_num asks for 28\d{4} logprobs with each token of all answers; at most 262144 are given"
    assert re.search(told, answer.text)
