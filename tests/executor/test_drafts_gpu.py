"""Drafts on a real device: graphs give the tokens of steps without drafts, and no launch waits for a count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from bough.core.plan import BatchPlan, InFlight
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.plain_plans import decode_plan, prompt_plan
from bough.loader.locate import locate
from tests.conftest import TINY_LLAMA
from tests.fakes.known_answers import RightOrWrong
from tests.fakes.scheduler_bench import Bench
from tests.parity.draft_models import write_eagle3, write_target

pytestmark = pytest.mark.gpu

SHAPE = {**TINY_LLAMA, "hidden_size": 128, "head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 2048}
SETTINGS = {"dtype": "float32", "max_running_requests": 8, "max_total_tokens": 4096, "chunked_prefill_size": 64}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 50, "seed": 4},
]
SLEEP_CYCLES = 2_000_000_000  # about a second: far longer than two launches take on any host


def build(folder: Path, **flags: Any) -> CudaExecutor:
    executor = build_executor(locate(str(folder)), Settings.from_flat({**SETTINGS, **flags})).executor
    assert isinstance(executor, CudaExecutor)
    while executor.idle():
        pass
    return executor


def answers(executor: CudaExecutor, known: list[list[int]] | None = None, requests: int = 6) -> list[list[int]]:
    """Prompts with what is said behind them, many or few at a time."""
    bench = Bench(cast(Any, executor), proposer=None if known is None else RightOrWrong(known))
    prompts = [[(3 * i + j * j) % 90 for j in range(10 + i)] for i in range(requests)]
    for i, prompt in enumerate(prompts):
        bench.ask(i, prompt, max_new_tokens=12 + 6 * i, ignore_eos=True, **SAMPLING[i % 3])
    bench.run()
    if known is not None:
        drafting = bench.scheduler._planner.drafting
        assert 0 < drafting.held < drafting.proposed
    return [[*prompt, *bench.out.outputs[i]] for i, prompt in enumerate(prompts)]


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


@pytest.mark.parametrize("flags", [{}, {"page_size": 16}, {"disable_cuda_graph": True}, {"attention_backend": "torch"}])
@pytest.mark.parametrize("deterministic", [False, True])
def test_drafts_of_the_host_change_nothing(shape: Path, flags: dict[str, Any], deterministic: bool) -> None:
    if deterministic and "attention_backend" in flags:
        pytest.skip("deterministic inference has its own attention")
    alike = {**flags, "load_format": "dummy", "enable_deterministic_inference": deterministic}
    executor = build(shape, **alike)
    wanted = answers(executor)
    executor.close()
    executor = build(shape, **alike, **NGRAM)
    assert answers(executor, wanted) == wanted
    executor.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_head_changes_nothing(tmp_path: Path, graphs: bool) -> None:
    target = write_target(tmp_path / "target", layers=4)
    write_eagle3(tmp_path / "head")
    executor = build(target, context_length=64)
    wanted = answers(executor, requests=4)
    executor.close()
    head = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(tmp_path / "head")}
    executor = build(target, context_length=64, speculative_adaptive=False, disable_cuda_graph=not graphs, **head)
    assert answers(executor, requests=4) == wanted
    assert all(bool(each._graphs) == graphs for each in executor._drafted.graphs.values())
    executor.close()


def drafted(step: int, spare: int) -> BatchPlan:
    given, rows = np.full(2, 3, dtype=np.int32), decode_plan(step, 2)
    tokens = np.arange(2 * (3 + spare), dtype=np.int32)
    return replace(
        rows, query_lens=given + 1, given=given, tokens=tokens, spare=None if not spare else given * 0 + spare
    )


def test_a_step_is_launched_before_the_counts_of_the_one_before_are_known(shape: Path) -> None:
    executor = build(shape, load_format="dummy", **NGRAM)

    def run(asleep: bool) -> list[list[int]]:
        for row in range(2):
            pages = np.arange(1 + 100 * row, 101 + 100 * row, dtype=np.int32)
            executor.launch(prompt_plan(row, np.arange(9, dtype=np.int32), pages)).wait()
        torch.cuda.synchronize()
        if asleep:
            torch.cuda._sleep(SLEEP_CYCLES)
        over = torch.cuda.Event()
        over.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps: list[InFlight] = [
                executor.launch(plan) for plan in (drafted(0, 0), drafted(1, 3), decode_plan(2, 2))
            ]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not asleep or not over.query(), "three steps were launched, and the device has come to none"
        return [step.wait().tokens.tolist() for step in steps]

    run(asleep=False)  # code that is loaded when it is first used may wait, once
    assert run(asleep=True) == run(asleep=False)
    executor.close()
