"""Ranks as real processes: their tokens, how they show, and how they end."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bough import Engine, EngineDeadError
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import MODELS
from tests.parity.engines import LocalEngine
from tests.system.sockets import LOOPBACK, inet_listeners, private_names

PATIENCE_S = 60.0
PROMPTS = [[5, 6, 7, 8], [9, 10, 11] * 12, [3], [5, 6, 7, 8, 9], *([number] * 20 for number in range(12, 20))]
GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
SMALL = {"max_total_tokens": 250, "schedule_conservativeness": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ranks")
    for name, config in MODELS.items():
        write_checkpoint(base / name, 3, **config)
    return base


@functools.cache
def of_one_rank(folder: Path) -> list[list[int]]:
    """Its tokens after each of the prompts; it needs no process of its own."""
    flags = {"device": "cpu", "cpu_threads": 1, "attention_backend": "torch", "max_total_tokens": 1200}
    engine = LocalEngine(folder, new=GREEDY["max_new_tokens"], **flags)
    return [tokens for tokens, _ in engine.ask(*PROMPTS)]


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return folder / "llama"


def engine_of(model: Path, **settings: Any) -> Engine:
    base = {"device": "cpu", "cpu_threads": 1, "skip_tokenizer_init": True, "max_total_tokens": 600}
    return Engine(model, **{**base, **settings})


def own_children() -> list[psutil.Process]:
    return psutil.Process(os.getpid()).children()


Children = Callable[[], dict[str, psutil.Process]]


@pytest.fixture
def children() -> Children:
    """What the test itself has started and still runs, by title: other tests' engines may live in this process too."""
    before = {process.pid for process in own_children()}

    def started() -> dict[str, psutil.Process]:
        found = [process for process in own_children() if process.pid not in before]
        titles = {" ".join(process.cmdline()).strip(): process for process in found}
        return {title: process for title, process in titles.items() if title.startswith("bough::")}

    return started


def wait_gone(processes: dict[str, psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes.values(), timeout=PATIENCE_S)
    assert not alive


# Each model's split is tested by ranks in threads; processes add the way between them, which is the same for all.
LONG = pytest.mark.long
OTHERS = ("moe", "latent", "states")


def mixed_load(engine: Engine) -> list[list[int]]:
    """Greedy tokens of requests that come together, of which one is aborted and more run than the cache holds."""

    async def ask(prompt: list[int], **options: Any) -> list[int]:
        output = await engine.async_generate(input_ids=prompt, sampling_params=GREEDY, **options)
        return list(output["output_ids"])

    async def all_of_them() -> list[list[int]]:
        endless = {**GREEDY, "max_new_tokens": 150}
        doomed = engine.async_generate(input_ids=[90] * 9, sampling_params=endless, rid="doomed", stream=True)
        stream = await doomed
        await anext(stream)
        asked = [asyncio.create_task(ask(prompt)) for prompt in PROMPTS]
        await anext(stream)
        await asyncio.to_thread(engine.abort_request, "doomed")
        return await asyncio.gather(*asked)

    return asyncio.run(all_of_them())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("llama", 2), pytest.param("llama", 4, marks=LONG), *(pytest.param(name, 2, marks=LONG) for name in OTHERS)],
)
def test_processes_give_the_tokens_of_one_and_leave_with_the_engine(
    folder: Path, children: Children, name: str, size: int
) -> None:
    expected = of_one_rank(folder / name)
    with engine_of(folder / name, tp_size=size, check_ranks=True, **SMALL) as engine:
        processes = children()
        ranks = range(1, size)
        assert {f"bough::executor TP{rank}" for rank in ranks} < set(processes)
        assert mixed_load(engine) == expected
        info = engine.get_server_info()
        weights = info["memory_usage"]["weight_of_ranks"]
        assert len(weights) == size and weights[0] == info["memory_usage"]["weight"]
        assert info["tp_size"] == size and info["internal_states"][0]["num_retractions"] > 0
        if Path("/proc/net/unix").exists():
            listeners = inet_listeners(list(processes.values()))
            assert len(listeners) == size and {address for address, _ in listeners} == {LOOPBACK}
            names = {"scheduler", "detokenizer", *(f"rank{rank}" for rank in ranks)}
            assert private_names(list(processes.values())) == names
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert engine.generate(input_ids=PROMPTS[1], sampling_params=GREEDY)["output_ids"] == expected[1]
    wait_gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "flags"),
    [
        ("moe", 2, {"ep_size": 2}),
        pytest.param("latent", 4, {"ep_size": 2, "ep_num_redundant_experts": 2}, marks=LONG),
        pytest.param("latent", 2, {"ep_size": 2, "moe_a2a_backend": "torch"}, marks=LONG),
    ],
)
def test_experts_on_processes_give_the_tokens_of_one(
    folder: Path, name: str, size: int, flags: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """They move under the load, too."""
    expected = of_one_rank(folder / name)
    moving = {"enable_eplb": True, "eplb_rebalance_num_iterations": 16, "log_level": "info"}
    with engine_of(folder / name, tp_size=size, **SMALL, **flags, **moving) as engine:
        engine.start_expert_distribution_record()
        assert mixed_load(engine) == expected
        engine.stop_expert_distribution_record()
        counts = engine.dump_expert_distribution_record()["logical_count"]
        assert len(counts) == 2 and sum(counts[-1]) >= sum(map(len, expected)) * (2 if name == "moe" else 3)
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert engine.generate(input_ids=PROMPTS[1], sampling_params=GREEDY)["output_ids"] == expected[1]
    told = capfd.readouterr().err
    assert "experts were rebalanced: This rank has read" in told
    assert told.count("GiB of weights as") == 1  # ranks do not repeat what the first says


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "hicache_storage_backend": "file"}])
def test_prefixes_come_back_from_the_memory_of_all_ranks(
    model: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BOUGH_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    tier = {"enable_hierarchical_cache": True, "max_total_tokens": 150, "page_size": 4}
    first = {"sampling_params": {**GREEDY, "max_new_tokens": 8}, "return_logprob": True}
    with engine_of(model, **tier, **flags) as engine:
        computed, _, _, found = (
            engine.generate(input_ids=[number, *range(20, 100)], **first) for number in (5, 6, 7, 5)
        )
    assert found["meta_info"]["cached_tokens_details"]["host"] >= 76
    assert found["output_ids"] == computed["output_ids"]
    logprobs = [[each[0] for each in answer["meta_info"]["output_token_logprobs"]] for answer in (computed, found)]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)


def generate_until_it_dies(engine: Engine, begun: threading.Event) -> str:
    endless = {"temperature": 0.0, "max_new_tokens": 500, "ignore_eos": True}
    with pytest.raises(EngineDeadError) as caught:
        while True:
            for _ in engine.generate(input_ids=[5, 6, 7], sampling_params=endless, stream=True):
                begun.set()
    return str(caught.value)


def disturb(engine: Engine, children: Children, blow: signal.Signals, title: str = "executor TP1") -> str:
    """What callers are told when a rank is hit in the middle of steps."""
    begun, told = threading.Event(), []
    caller = threading.Thread(target=lambda: told.append(generate_until_it_dies(engine, begun)))
    caller.start()
    assert begun.wait(PATIENCE_S)
    children()[f"bough::{title}"].send_signal(blow)
    caller.join(PATIENCE_S)
    return str(told[0])


@pytest.mark.slow
@pytest.mark.parametrize("title", ["executor TP1", pytest.param("scheduler", marks=LONG)])
def test_a_killed_rank_ends_the_engine_with_the_reason(model: Path, children: Children, title: str) -> None:
    with engine_of(model, tp_size=2) as engine:
        processes = children()
        told = disturb(engine, children, signal.SIGKILL, title)
        assert told.startswith(f"The {title} process (pid ") and told.endswith(" was killed by SIGKILL.")
        wait_gone(processes)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_engine_by_the_timeout(model: Path, children: Children) -> None:
    with engine_of(model, tp_size=2, dist_timeout=3.0) as engine:
        processes = children()
        told = disturb(engine, children, signal.SIGSTOP)
        assert "The scheduler process" in told and "Rank 0 of 2 could not" in told and "in step " in told
        wait_gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_ranks_check_drafts(algorithm: str, model: Path) -> None:
    prompts = [[5, 6, 7, 8] * 8, [9, 10, 11] * 12, [3] * 30]
    drafts: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_adaptive": False}
    if algorithm == "STANDALONE":
        drafts["speculative_draft_model_path"] = model
    with engine_of(model, tp_size=2, **drafts) as engine:
        found = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        again = engine.generate(input_ids=prompts, sampling_params=GREEDY)  # which can be drafted from the answers
        assert engine.get_server_info()["internal_states"][0]["spec_num_correct_drafts"] > 0
    flags = {"device": "cpu", "cpu_threads": 1, "attention_backend": "torch", "max_total_tokens": 600}
    expected = [tokens for tokens, _ in LocalEngine(model, new=GREEDY["max_new_tokens"], **flags).ask(*prompts)]
    assert [output["output_ids"] for output in found] == [output["output_ids"] for output in again] == expected
