"""Prefill and decode engines as real processes, behind a gateway: answers are those of one engine, and a kill loses
none. An engine that is asked directly computes the prompt itself: that is the engine to compare with."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.pairs import Fleet, fleet, free_port
from tests.system.serving import PATIENCE_S, TINY, running

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "max_new_tokens": 12}
TEXT = "Once upon a time there was a small town by the sea. " * 5
STREAMS = 4
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


@pytest.fixture(scope="module")
def engines() -> Iterator[Fleet]:
    flags = ("--max-total-tokens", "6000", "--dtype", "float32", "--quantization", "none")
    with fleet(*flags, "--cpu-threads", "1") as started:
        yield started


def ask(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def figures(url: str) -> dict[str, float]:
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("bough:") and "{" in line]
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


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
    before = figures(engines.decode.url)["bough:disaggregation_transfers_total"]
    paired = ask(engines.gateway.url, body)
    assert figures(engines.decode.url)["bough:disaggregation_transfers_total"] > before
    alone = ask(engines.prefills[0].url, body)
    for one, other in zip(
        *(answer if isinstance(answer, list) else [answer] for answer in (paired, alone)), strict=True
    ):
        assert one["text"] == other["text"]
        assert one["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"]
        for name in ("output_token_logprobs", "input_token_logprobs"):
            for mine, theirs in zip(one["meta_info"].get(name, ()), other["meta_info"].get(name, ()), strict=True):
                assert mine[1] == theirs[1] and (mine[0] is None or abs(mine[0] - theirs[0]) < 1e-3)


def test_an_engine_with_a_prefill_engine_of_its_own(tiny_model: Path) -> None:
    port, flags = free_port(), ("--model-path", str(tiny_model), *TINY)
    mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    home = ("--prefill-url", "http://127.0.0.1:1", "--disaggregation-bootstrap-port", str(port))
    body = {"input_ids": [3 + i % 50 for i in range(90)], "sampling_params": GREEDY}
    with running(*flags, *mode) as prefill, running(*flags, "--disaggregation-mode", "decode", *home) as decode:
        alone = ask(prefill.url, body)
        assert ask(decode.url, body)["output_ids"] == alone["output_ids"]
        assert figures(decode.url)["bough:disaggregation_transfers_total"] == 1
        assert figures(prefill.url)["bough:disaggregation_transferred_bytes_total"] > 0
        routed = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": [5, 6]}  # as SGLang's router
        batch = {"input_ids": [[7] * 40, [9] * 30], "sampling_params": GREEDY}
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(ask, server.url, batch | routed) for server in (prefill, decode)]
            answers = [each.result() for each in both]
        assert [each["output_ids"] for each in answers[1]] == [each["output_ids"] for each in ask(prefill.url, batch)]
        assert [len(each["output_ids"]) for each in answers[0]] == [1, 1]
        prefill.end()
        other = body | {"input_ids": [11] * 80}
        assert len(ask(decode.url, other)["output_ids"]) == GREEDY["max_new_tokens"]
        assert "computed here" in decode.log()


def test_a_kill_under_load_loses_no_stream(engines: Fleet) -> None:
    bodies = [{"text": f"{i} {TEXT}", "sampling_params": GREEDY, "stream": True} for i in range(STREAMS)]
    texts: dict[int, str] = {}

    def read(number: int) -> None:
        with httpx.stream("POST", f"{engines.gateway.url}/generate", json=bodies[number], timeout=PATIENCE_S) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
        texts[number] = json.loads(lines[-1][6:]).get("text", lines[-1])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    engines.prefills[1].end()
    for thread in threads:
        thread.join(PATIENCE_S)
    alone = {number: ask(engines.prefills[0].url, body | {"stream": False}) for number, body in enumerate(bodies)}
    assert texts == {number: answer["text"] for number, answer in alone.items()}
    for server in (engines.prefills[0], engines.decode):
        load = httpx.get(f"{server.url}/v1/loads", timeout=PATIENCE_S).json()["loads"][0]
        assert load["num_used_tokens"] == load["num_running_reqs"] == load["num_waiting_reqs"] == 0
    time.sleep(1.5)  # engines at rest audit their pages
    assert "do not add up" not in engines.logs()
