"""Prefill and decode engines as real processes, behind a gateway: answers are those of one engine, and none is lost
when engines are stopped or killed. A prefill engine that is asked directly answers by itself: that is the engine to
compare with. All tests of a transport share the engines, of which the last one kills some."""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from tests.system.pairs import Fleet, fleet
from tests.system.serving import PATIENCE_S, Server, load_of

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "max_new_tokens": 12}
TEXT = "Once upon a time there was a small town by the sea. " * 5
LOAD = "There was a small town by the sea, and every morning the boats went out. " * 10
STREAMS = 32
LONG = {**GREEDY, "max_new_tokens": 40, "ignore_eos": True}
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


@pytest.fixture(scope="module", params=["shm and tcp", "nixl", "mooncake"])
def engines(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    shallow = ("--json-model-override-args", '{"num_hidden_layers": 2}')
    flags = ("--max-total-tokens", "12000", "--dtype", "float32", "--quantization", "none", "--cpu-threads", "1")
    slowly = ("--chunked-prefill-size", "64")  # so that prompts are under way when one is done
    transports: dict[str, Any] = {}
    if request.param != "shm and tcp":
        try:
            importlib.import_module({"nixl": "nixl._api", "mooncake": "mooncake.engine"}[request.param])
        except ImportError as error:
            pytest.skip(f"{request.param} is not installed, or lacks a library: {error}")
        transports = {"backends": (request.param,) * 2, "decode": request.param}
    with fleet(*flags, *shallow, *slowly, **transports) as started:
        yield started


def ask(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def figures(url: str) -> dict[str, float]:
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("bough:") and "{" in line]
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


def counted(engines: Fleet, name: str = "transfers") -> float:
    """Over the decode engines that live."""
    alive = [server for server in engines.decodes if server.process.poll() is None]
    return sum(figures(server.url)[f"bough:disaggregation_{name}_total"] for server in alive)


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
    before = counted(engines)
    paired = ask(engines.gateway.url, body)
    assert counted(engines) > before
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
    body, before = {"text": f"Its own. {TEXT}", "sampling_params": GREEDY}, counted(engines)
    assert ask(decode.url, body)["text"] == ask(prefill.url, body)["text"]
    assert counted(engines) == before + 1


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
    """Of a stream, or the error in its place; `begun` gets the first as soon as it is there."""
    with httpx.stream("POST", f"{url}/generate", json=body | {"stream": True}, timeout=PATIENCE_S) as answer:
        if answer.status_code != 200:
            return json.loads(answer.read())
        last = ""
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                begun += [] if last else [line]
                last = line
    return json.loads(last[6:])


def streams_over(engines: Fleet, word: str, enough: int, disturb: Callable[[], None]) -> list[Any]:
    """How streams end during which something happens, once so many have begun. They end right, or with an error."""
    begun: list[str] = []
    bodies = [{"text": f"{word} {i}. {LOAD}", "sampling_params": LONG} for i in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(last_event, engines.gateway.url, body, begun) for body in bodies]
        while len(begun) < enough and not all(stream.done() for stream in streams):
            time.sleep(0.001)
        disturb()
        events = [stream.result() for stream in streams]
    alone = ask(engines.prefills[0].url, {"text": [body["text"] for body in bodies], "sampling_params": LONG})
    for one, event in zip(alone, events, strict=True):
        assert "error" in event or event["text"] == one["text"]
    return events


def tell(server: Server, number: signal.Signals) -> None:
    for process in (server.process, *server.children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def kill(server: Server) -> None:
    tell(server, signal.SIGKILL)
    server.end()


def at_rest(engines: Fleet, *servers: Server) -> None:
    """Nothing is held for requests any more, and the pages add up: engines at rest audit them."""
    deadline, held = time.monotonic() + PATIENCE_S, [1]
    while any(held):
        assert time.monotonic() < deadline, held
        loads = [load_of(server.url) for server in servers]
        held = [load[f"num_{what}"] for load in loads for what in ("used_tokens", "running_reqs", "waiting_reqs")]
        time.sleep(0.1)
    time.sleep(1.5)
    assert "do not add up" not in engines.logs()


def failovers(engines: Fleet) -> float:
    page = httpx.get(f"{engines.gateway.url}/metrics", timeout=PATIENCE_S).text
    lines = [line for line in page.splitlines() if "stream_failovers_total" in line and not line.startswith("#")]
    return sum(float(line.split()[-1]) for line in lines)


FEW, MOST = 1, STREAMS - 4


@pytest.mark.long
def test_engines_that_stand_still_lose_no_stream(engines: Fleet) -> None:
    """A prefill engine to which prompts come, then a decode engine in the middle of answers. They go on later."""
    everyone = *engines.prefills, *engines.decodes
    before = counted(engines, "failed_transfers")
    for server, enough in ((engines.prefills[1], 0), (engines.decodes[0], MOST)):
        disturb = partial(tell, server, signal.SIGSTOP)
        try:
            events = streams_over(engines, f"Stop {enough}", enough, disturb)
        finally:
            tell(server, signal.SIGCONT)
        assert not any("error" in event for event in events), events
        engines.gateway.wait_for(len(everyone))
        at_rest(engines, *everyone)
    assert counted(engines, "failed_transfers") > before
    assert failovers(engines) > 0


def test_kills_under_load(engines: Fleet) -> None:
    """One engine after the other."""
    prefills, decodes = engines.prefills, engines.decodes
    failed, moved = counted(engines, "failed_transfers"), failovers(engines)
    # Its server still says that it is well, so that its prompts stay with it until the others have all begun.
    prefills[1].child("scheduler").suspend()
    events = streams_over(engines, "Prefill", STREAMS // 2, partial(kill, prefills[1]))
    assert counted(engines, "failed_transfers") > failed
    events += streams_over(engines, "Decode", MOST, partial(kill, decodes[0]))
    assert failovers(engines) > moved
    assert not any("error" in event for event in events), events
    at_rest(engines, prefills[0], decodes[1])

    events = streams_over(engines, "Last", FEW, partial(kill, decodes[1]))
    assert all("error" in event for event in events), events
    at_rest(engines, prefills[0])
