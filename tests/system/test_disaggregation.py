"""Prefill and decode engines as real processes, behind a gateway: answers are those of one engine, and a kill loses
none. A prefill engine that is asked directly answers by itself: that is the engine to compare with. All tests share
the engines, of which the last ones kill some."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.system.pairs import Fleet, fleet
from tests.system.serving import PATIENCE_S, Server, load_of

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "max_new_tokens": 12}
TEXT = "Once upon a time there was a small town by the sea. " * 5
STREAMS = 3
LONG = {**GREEDY, "max_new_tokens": 60, "ignore_eos": True}
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


@pytest.fixture(scope="module")
def engines() -> Iterator[Fleet]:
    shallow = ("--json-model-override-args", '{"num_hidden_layers": 2}')
    flags = ("--max-total-tokens", "6000", "--dtype", "float32", "--quantization", "none", "--cpu-threads", "1")
    with fleet(*flags, *shallow) as started:
        yield started


def ask(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def figures(url: str) -> dict[str, float]:
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("bough:") and "{" in line]
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


def transfers(engines: Fleet) -> float:
    return sum(figures(server.url)["bough:disaggregation_transfers_total"] for server in engines.decodes)


CASES = {
    "greedy": {"sampling_params": GREEDY},
    "logprobs": {"sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 3},
    "seed": {"sampling_params": {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 16}},
    "samples": {"sampling_params": {"temperature": 1.0, "sampling_seed": 3, "n": 3, "max_new_tokens": 8}},
    "penalty": {"sampling_params": {**GREEDY, "frequency_penalty": 0.8}},
    "grammar": {"sampling_params": {**GREEDY, "json_schema": SCHEMA}},
    "stop": {"sampling_params": {**GREEDY, "stop": [" the"]}},
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_one_engine(engines: Fleet, case: str) -> None:
    body = {"text": f"{case}. {TEXT}", **CASES[case]}
    before = transfers(engines)
    paired = ask(engines.gateway.url, body)
    assert transfers(engines) > before
    alone = ask(engines.prefills[0].url, body)
    for one, other in zip(
        *(answer if isinstance(answer, list) else [answer] for answer in (paired, alone)), strict=True
    ):
        assert one["text"] == other["text"]
        assert one["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"]
        for name in ("output_token_logprobs", "input_token_logprobs"):
            for mine, theirs in zip(one["meta_info"].get(name, ()), other["meta_info"].get(name, ()), strict=True):
                assert mine[1] == theirs[1] and (mine[0] is None or abs(mine[0] - theirs[0]) < 1e-3)


def test_an_engine_with_a_prefill_engine_of_its_own(engines: Fleet) -> None:
    prefill, decode = engines.prefills[0], engines.decodes[1]
    body, before = {"text": f"Its own. {TEXT}", "sampling_params": GREEDY}, transfers(engines)
    assert ask(decode.url, body)["text"] == ask(prefill.url, body)["text"]
    assert transfers(engines) == before + 1


def test_a_router_that_sends_requests_to_both(engines: Fleet) -> None:
    prefill, decode = engines.prefills[0], engines.decodes[0]
    routed = {"bootstrap_host": "127.0.0.1", "bootstrap_port": engines.port, "bootstrap_room": [5, 6]}
    batch = {"input_ids": [[7] * 40, [9] * 30], "sampling_params": GREEDY}
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(ask, server.url, batch | routed) for server in (prefill, decode)]
        answers = [each.result() for each in both]
    assert [each["output_ids"] for each in answers[1]] == [each["output_ids"] for each in ask(prefill.url, batch)]
    assert [len(each["output_ids"]) for each in answers[0]] == [1, 1]


def last_event(url: str, body: dict[str, Any], begun: list[str]) -> Any:
    """Of a stream; `begun` gets the first as soon as it is there."""
    with httpx.stream("POST", f"{url}/generate", json=body | {"stream": True}, timeout=PATIENCE_S) as answer:
        last = ""
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                begun += [] if last else [line]
                last = line
    return json.loads(last[6:])


def streams_over_a_kill(engines: Fleet, server: Server, word: str) -> list[Any]:
    """How streams end whose engine is killed when all have begun."""
    begun: list[str] = []
    bodies = [{"text": f"{word} {i} {TEXT}", "sampling_params": LONG} for i in range(STREAMS)]
    victims = [server.process, *server.children()]
    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(last_event, engines.gateway.url, body, begun) for body in bodies]
        while len(begun) < STREAMS and not all(stream.done() for stream in streams):
            time.sleep(0.001)
        for victim in victims:  # at once, because the streams are short
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        server.end()
        events = [stream.result() for stream in streams]
    alone = ask(engines.prefills[0].url, {"text": [body["text"] for body in bodies], "sampling_params": LONG})
    for one, event in zip(alone, events, strict=True):
        assert "error" in event or event["text"] == one["text"]
    return events


def at_rest(*servers: Server) -> None:
    for server in servers:
        load = load_of(server.url)
        assert load["num_used_tokens"] == load["num_running_reqs"] == load["num_waiting_reqs"] == 0
    time.sleep(1.5)  # engines at rest audit their pages


def test_kills_under_load(engines: Fleet) -> None:
    """One engine after the other."""
    events = streams_over_a_kill(engines, engines.prefills[1], "Prefill")
    events += streams_over_a_kill(engines, engines.decodes[0], "Decode")
    assert not any("error" in event for event in events)
    page = httpx.get(f"{engines.gateway.url}/metrics", timeout=PATIENCE_S).text
    assert any("stream_failovers_total" in line and not line.endswith(" 0.0") for line in page.splitlines())
    at_rest(engines.prefills[0], engines.decodes[1])
    assert "do not add up" not in engines.logs()

    events = streams_over_a_kill(engines, engines.decodes[1], "Last")
    assert all("error" in event for event in events), events
