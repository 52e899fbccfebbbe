"""Fields with very many entries: they are refused by their number alone, or read in a thread, so that other requests go
on; and what all requests of a call share is not sent without end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from bough.client.inputs import InputReader, Inputs
from bough.core.sampling_params import SamplingParams
from bough.server import context
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
    for length in (1, 100):
        words = ["x" * 1000] * length
        assert ask(*routes("bad_words", words)[route])[0].status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


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
