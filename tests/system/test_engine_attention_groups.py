"""Attention groups as real processes: their tokens whichever has work, their caches, and how they end."""

from __future__ import annotations

import itertools
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from bough import Engine, EngineDeadError
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import MODELS
from tests.system.test_engine_ranks import GREEDY, PATIENCE_S, PROMPTS, engine_of, mixed_load, of_one_rank, wait_gone
from tests.system.test_engine_replicas import SMALL, own_replicas

A2A = {"moe_a2a_backend": "torch"}
MOVING = {"enable_eplb": True, "eplb_rebalance_num_iterations": 16, "ep_num_redundant_experts": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("groups")
    for name in ("moe", "latent"):
        write_checkpoint(base / name, 3, **MODELS[name])
    return base


def grouped(model: Path, tp_size: int, **settings: Any) -> Engine:
    return engine_of(model, tp_size=tp_size, dp_size=2, enable_dp_attention=True, **settings)


def one_by_one(engine: Engine, prompt: list[int], rank: int) -> list[int]:
    return list(engine.generate(input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=rank)["output_ids"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp_size", "flags"),
    [
        ("moe", 2, {"ep_size": 2}),
        pytest.param("moe", 2, {}, marks=pytest.mark.long),
        ("latent", 2, {"ep_size": 2, **A2A}),
        ("latent", 4, {"check_ranks": True}),
        pytest.param("latent", 2, {"ep_size": 2, **MOVING}, marks=pytest.mark.long),
    ],
)
def test_groups_give_the_tokens_of_one_rank_whichever_has_work(
    folder: Path, name: str, tp_size: int, flags: dict[str, Any]
) -> None:
    wanted = of_one_rank(folder / name)
    with grouped(folder / name, tp_size, **SMALL, **flags) as engine:
        processes = own_replicas()
        titles = {f"{role} DP{rank}" for role in ("scheduler", "detokenizer") for rank in (0, 1)}
        assert set(processes) == titles | {f"executor DP{rank} TP1" for rank in (0, 1) if tp_size == 4}
        assert mixed_load(engine) == wanted
        # One group has all the work, then the other; then one goes on for longer than the other.
        for rank in (0, 1):
            assert one_by_one(engine, PROMPTS[1], rank) == wanted[1]
        longer = {**GREEDY, "max_new_tokens": 120}
        stream = engine.generate(input_ids=[90] * 9, sampling_params=longer, stream=True, routed_dp_rank=1)
        next(stream)
        for prompt in (0, 2, 3):
            assert one_by_one(engine, PROMPTS[prompt], 0) == wanted[prompt]
        assert len(list(stream)[-1]["output_ids"]) == 120
        info = engine.get_server_info()
        states = info["internal_states"]
        assert [state["dp_rank"] for state in states] == [0, 1] and info["enable_dp_attention"]
        assert sum(state["num_retractions"] for state in states) > 0
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert one_by_one(engine, PROMPTS[1], 1) == wanted[1]
    wait_gone(processes)


@pytest.mark.slow
def test_each_group_has_a_cache_of_its_own(folder: Path) -> None:
    """Ranks that share the heads of latent attention all have the latents of all tokens. Groups have different ones."""
    long = {**GREEDY, "max_new_tokens": 200}
    with grouped(folder / "latent", 2, max_total_tokens=250) as engine:
        streams = [
            engine.generate(input_ids=[5 + rank] * 9, sampling_params=long, stream=True, routed_dp_rank=rank)
            for rank in (0, 1)
        ]
        for _ in itertools.zip_longest(*streams):
            pass
        states = engine.get_server_info()["internal_states"]
    assert [state["max_total_num_tokens"] for state in states] == [250, 250]
    assert all(state["cached_prefix_tokens"] > 200 and not state["num_retractions"] for state in states)


def disturbed(engine: Engine, title: str, blow: signal.Signals) -> str:
    """What a caller of the first group is told when a process of the second is hit while that has nothing to do."""
    processes, told = own_replicas(), list[str]()
    endless, begun = {**GREEDY, "max_new_tokens": 400}, threading.Event()

    def call() -> None:
        with pytest.raises(EngineDeadError) as caught:
            while True:
                for _ in engine.generate(input_ids=[5, 6], sampling_params=endless, stream=True, routed_dp_rank=0):
                    begun.set()
        told.append(str(caught.value))

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(PATIENCE_S)
    processes[title].send_signal(blow)
    caller.join(PATIENCE_S)
    wait_gone(processes)
    return told[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "tp_size"), [("scheduler DP1", 2), pytest.param("executor DP1 TP1", 4, marks=pytest.mark.long)]
)
def test_a_killed_rank_of_another_group_ends_the_engine_with_the_reason(folder: Path, title: str, tp_size: int) -> None:
    with grouped(folder / "latent", tp_size) as engine:
        told = disturbed(engine, title, signal.SIGKILL)
    assert told.startswith(f"The {title} process (pid ") and told.endswith(" was killed by SIGKILL.")


@pytest.mark.slow
def test_a_group_that_hangs_ends_the_engine_by_the_timeout(folder: Path) -> None:
    with grouped(folder / "moe", 2, dist_timeout=3.0) as engine:
        told = disturbed(engine, "scheduler DP1", signal.SIGSTOP)
    assert "The scheduler DP0 process" in told and "Rank 0 of 2 could not" in told and "in step " in told
    assert "; rank 1 did not come: " in told
