"""Replicas as real processes: their tokens, how they show, and what is left when one dies."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bough import EngineDeadError
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import MODELS
from tests.parity.engines import fp32_engine
from tests.system.serving import PATIENCE_S, TINY, running, until
from tests.system.test_engine_ranks import GREEDY, PROMPTS, SMALL, engine_of, mixed_load, of_one_rank, wait_gone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    write_checkpoint(folder, 3, **MODELS["llama"])
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return of_one_rank(model)


def titled(pid: int) -> dict[str, psutil.Process]:
    found = {" ".join(each.cmdline()).strip(): each for each in psutil.Process(pid).children(recursive=True)}
    return {title.removeprefix("bough::"): each for title, each in found.items() if title.startswith("bough::")}


def own_replicas() -> dict[str, psutil.Process]:
    return {title: each for title, each in titled(os.getpid()).items() if " DP" in title}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "rank_title"),
    [
        ({}, None),  # ranks: in the test below
        pytest.param({"tp_size": 2}, "TP1", marks=pytest.mark.long),
        pytest.param({"pp_size": 2}, "PP1 TP0", marks=pytest.mark.long),
    ],
)
def test_two_replicas_give_the_tokens_of_one_engine(
    model: Path, expected: list[list[int]], split: dict[str, int], rank_title: str | None
) -> None:
    with engine_of(model, attention_backend="torch", dp_size=2, **{"tp_size": 1, **split}, **SMALL) as engine:
        processes = own_replicas()
        titles = {f"{role} DP{rank}" for role in ("scheduler", "detokenizer") for rank in (0, 1)}
        titles |= {f"executor DP{rank} {rank_title}" for rank in (0, 1) if rank_title is not None}
        assert set(processes) == titles
        assert mixed_load(engine) == expected
        batch = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert [output["output_ids"] for output in batch] == expected
        assert {output["meta_info"]["dp_rank"] for output in batch} == {0, 1}
        for rank in (0, 1):
            chosen = engine.generate(input_ids=PROMPTS[1], sampling_params=GREEDY, routed_dp_rank=rank)
            assert (chosen["output_ids"], chosen["meta_info"]["dp_rank"]) == (expected[1], rank)
        info = engine.get_server_info()
        assert [state["dp_rank"] for state in info["internal_states"]] == [0, 1] and info["dp_size"] == 2
        assert all(state["generated_tokens"] > 100 for state in info["internal_states"])
        assert engine.flush_cache()
        assert [state["cached_prefix_tokens"] for state in engine.get_server_info()["internal_states"]] == [0, 0]
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert engine.generate(input_ids=PROMPTS[1], sampling_params=GREEDY)["output_ids"] == expected[1]
    wait_gone(processes)


@pytest.mark.long
@pytest.mark.parametrize("name", ["moe", "latent"])
def test_replicas_of_two_ranks_share_experts_and_latents(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, 3, **MODELS[name])
    with engine_of(tmp_path, dp_size=2, tp_size=2, check_ranks=True, **SMALL) as engine:
        assert mixed_load(engine) == of_one_rank(tmp_path)
        states = engine.get_server_info()["internal_states"]
        assert [state["dp_rank"] for state in states] == [0, 1] and sum(each["num_retractions"] for each in states) > 0


@pytest.mark.slow
def test_a_killed_replica_leaves_the_other_serving_and_the_last_one_ends_the_engine(
    model: Path, expected: list[list[int]]
) -> None:
    endless = {**GREEDY, "max_new_tokens": 480}
    with engine_of(model, dp_size=2, tp_size=2) as engine:
        processes = own_replicas()
        stream = engine.generate(input_ids=[5, 6, 7], sampling_params=endless, stream=True, routed_dp_rank=1)
        next(stream)
        processes["executor DP1 TP1"].kill()
        with pytest.raises(EngineDeadError, match=r"The executor DP1 TP1 process .* was killed by SIGKILL\."):
            list(stream)
        wait_gone({title: each for title, each in processes.items() if " DP1" in title})
        batch = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert [output["output_ids"] for output in batch] == expected
        assert {output["meta_info"]["dp_rank"] for output in batch} == {0}
        info = engine.get_server_info()
        assert [state["dp_rank"] for state in info["internal_states"]] == [0]
        assert "executor DP1 TP1 process" in info["dead_replicas"]["1"]
        processes["scheduler DP0"].kill()
        with pytest.raises(EngineDeadError, match=r"The scheduler DP0 process .* was killed by SIGKILL\."):
            while True:
                engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
        wait_gone(processes)


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S)


@pytest.mark.slow
def test_a_request_that_waits_for_its_answer_is_moved(model: Path) -> None:
    flags = [*TINY, "--device", "cpu", "--dp-size", "2", "--tokenizer-worker-num", "2", "--log-level", "error"]
    body: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": {**GREEDY, "max_new_tokens": 400}}
    with running("--model-path", str(model), *flags) as server:
        alone = ask(server.url, **body).json()["output_ids"]
        answers: list[httpx.Response] = []
        callers = [threading.Thread(target=lambda: answers.append(ask(server.url, **body))) for _ in range(12)]
        for caller in callers:
            caller.start()

        def loads() -> list[int]:
            return [load["num_reqs"] for load in httpx.get(f"{server.url}/get_load").json()]

        until(lambda: min(loads()) > 0, "both replicas have requests")
        with httpx.stream(
            "POST", f"{server.url}/generate", json={**body, "stream": True, "routed_dp_rank": 1}, timeout=PATIENCE_S
        ) as begun:
            lines = begun.iter_lines()
            assert '"output_ids"' in next(lines)
            titled(server.process.pid)["scheduler DP1"].send_signal(signal.SIGKILL)
            last = [line for line in lines if line][-2:]  # the reason, and the end of the stream
        assert "The scheduler DP1 process" in last[0] and "was killed by SIGKILL" in last[0] and "error" in last[0]
        for caller in callers:
            caller.join(PATIENCE_S)
        assert [answer.status_code for answer in answers] == [200] * 12
        assert [answer.json()["output_ids"] for answer in answers] == [alone] * 12
        assert httpx.get(f"{server.url}/health").status_code == 200
        until(lambda: all(len(loads()) == 1 for _ in range(8)), "a death that either HTTP process knows of")
        assert httpx.get(f"{server.url}/v1/loads").json()["dp_rank_count"] == 1
        body["sampling_params"] = {"max_new_tokens": 1}
        for _ in range(8):
            assert ask(server.url, **body, routed_dp_rank=0).status_code == 200
            assert ask(server.url, **body, routed_dp_rank=1).status_code == 503
        assert "Replica 1 is dead; the others serve on." in server.log()
        titled(server.process.pid)["detokenizer DP0"].send_signal(signal.SIGKILL)
        assert server.wait() != 0
        assert "The detokenizer DP0 process" in server.log()


@pytest.mark.slow
def test_a_replica_that_hangs_is_taken_out(model: Path) -> None:
    flags = [*TINY, "--device", "cpu", "--dp-size", "2", "--watchdog-timeout", "2", "--log-level", "error"]
    body = {"input_ids": [5, 6, 7], "sampling_params": GREEDY}
    with running("--model-path", str(model), *flags) as server:
        titled(server.process.pid)["scheduler DP1"].send_signal(signal.SIGSTOP)
        assert [ask(server.url, **body).status_code for _ in range(4)] == [200] * 4
        refused = ask(server.url, **body, routed_dp_rank=1)
        assert refused.status_code == 503 and "Replica 1 has not moved for 2 s" in refused.text
        assert httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE_S).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        until(lambda: "scheduler DP1" not in titled(server.process.pid), "its processes are gone")


@pytest.mark.slow
def test_the_default_model_on_two_replicas_answers_like_one(tmp_path: Path) -> None:
    prompts = ["The capital of France is", "Water boils at", "List three rivers: ", "Once upon a time"]
    greedy = {"temperature": 0.0, "max_new_tokens": 24}
    regex = {**greedy, "regex": "[0-9]{3} [a-z]+ rivers"}
    with fp32_engine(device="cpu") as engine:
        plain = engine.generate(prompts, greedy, return_logprob=True)
        shaped = engine.generate(prompts, regex)
    flags = ("--device", "cpu", "--dtype", "float32", "--quantization", "none", "--dp-size", "2", "--cpu-threads", "1")
    with running(*flags, "--max-total-tokens", "4096") as server:
        found = ask(server.url, text=prompts, sampling_params=greedy, return_logprob=True).json()
        assert [output["text"] for output in found] == [output["text"] for output in plain]
        assert {output["meta_info"]["dp_rank"] for output in found} == {0, 1}
        for mine, its in zip(found, plain, strict=True):
            of_mine, of_its = (each["meta_info"]["output_token_logprobs"] for each in (mine, its))
            assert [entry[0] for entry in of_mine] == pytest.approx([entry[0] for entry in of_its], abs=1e-3)
        found = ask(server.url, text=prompts, sampling_params=regex).json()
        assert [output["text"] for output in found] == [output["text"] for output in shaped]
        page = httpx.get(f"{server.url}/metrics").text
        assert 'dp_rank="0"' in page and 'dp_rank="1"' in page
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "routed_dp_rank": 1}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=PATIENCE_S).status_code == 200
