"""Stages as real processes: their tokens, how they show, and how they end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from bough import SettingsError
from tests.system.test_engine_ranks import (  # noqa: F401 (fixtures)
    GREEDY,
    LONG,
    PROMPTS,
    SMALL,
    Children,
    children,
    disturb,
    engine_of,
    folder,
    mixed_load,
    model,
    of_one_rank,
    wait_gone,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp_size", "ep_size", "flags"),
    [
        ("llama", 1, 1, {}),
        ("moe", 2, 2, {}),
        pytest.param("llama", 2, 1, {}, marks=LONG),
        pytest.param("moe", 1, 1, {}, marks=LONG),
        pytest.param("latent", 1, 1, {}, marks=LONG),
        pytest.param("latent", 2, 1, {}, marks=LONG),
        pytest.param("moe", 2, 2, {"enable_eplb": True, "eplb_rebalance_num_iterations": 16}, marks=LONG),
    ],
)
def test_two_stages_give_the_tokens_of_one_and_leave_with_the_engine(
    folder: Path,  # noqa: F811
    children: Children,  # noqa: F811
    name: str,
    tp_size: int,
    ep_size: int,
    flags: dict[str, Any],
) -> None:
    expected, flags = of_one_rank(folder / name), {**SMALL, **flags, "check_ranks": True}
    with engine_of(folder / name, tp_size=tp_size, pp_size=2, ep_size=ep_size, **flags) as engine:
        processes = children()
        others = [(stage, rank) for stage in range(2) for rank in range(tp_size)][1:]
        assert {f"bough::executor PP{stage} TP{rank}" for stage, rank in others} < set(processes)
        assert mixed_load(engine) == expected
        info = engine.get_server_info()
        assert info["pp_size"] == 2 and info["internal_states"][0]["num_retractions"] > 0
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert engine.generate(input_ids=PROMPTS[1], sampling_params=GREEDY)["output_ids"] == expected[1]
    wait_gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize("title", ["executor PP1 TP0", pytest.param("scheduler", marks=LONG)])
def test_a_killed_stage_ends_the_engine_with_the_reason(model: Path, children: Children, title: str) -> None:  # noqa: F811
    with engine_of(model, pp_size=2) as engine:
        processes = children()
        told = disturb(engine, children, signal.SIGKILL, title)
        assert told.startswith(f"The {title} process (pid ") and told.endswith(" was killed by SIGKILL.")
        wait_gone(processes)


@LONG
@pytest.mark.slow
def test_a_stage_that_hangs_ends_the_engine_by_the_timeout(model: Path, children: Children) -> None:  # noqa: F811
    with engine_of(model, pp_size=2, dist_timeout=3.0) as engine:
        processes = children()
        told = disturb(engine, children, signal.SIGSTOP, "executor PP1 TP0")
        assert "The scheduler process" in told
        assert "Rank 0 of 2 could not pass hidden states on" in told or "has not sent the result of step" in told
        wait_gone(processes)


@pytest.mark.slow
def test_too_many_stages_are_refused_with_the_reason(model: Path) -> None:  # noqa: F811
    with pytest.raises(SettingsError, match="--pp-size 3: the 2 layers of this model make 2 stages at most"):
        engine_of(model, pp_size=3)
