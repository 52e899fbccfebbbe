"""A pipeline's steps: which rows decode in them, that the stages have work, and that tokens come out as they should."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bough.scheduler.planner import MicroBatches
from bough.scheduler.rows import Phase
from tests.fakes.executor import PipelineExecutor, oracle
from tests.fakes.grammars import EOS, PIECES, FakeGrammars, Places, grammar
from tests.fakes.scheduler_bench import Bench

PLACES: Places = [[11, 22, 33], [9], [8], [7], [11, 22], [44, 33]]


@pytest.mark.parametrize(
    ("waiting", "most", "expected"),
    [
        ((), None, [[0, 1, 2], [3, 4], [], []]),  # as many as stages hold all, and each row is in one
        ((1, 4), None, [[0, 2, 3], [], []]),
        ((0, 1, 2, 3, 4), None, [[], []]),
        ((), 1, [[0], [1], [2], [3], [4], []]),
        ((), 9, [[0, 1, 2, 3, 4], []]),
    ],
)
def test_rows_are_dealt_out_to_the_stages(waiting: tuple[int, ...], most: int | None, expected: list) -> None:  # type: ignore[type-arg]
    """Those whose tokens have not come yet wait, and so do those of a step that was launched."""
    table = SimpleNamespace(known=np.full(5, 4), length=np.full(5, 3), phase=np.full(5, Phase.DECODE))
    table.length[list(waiting)] = 4
    batches, found = MicroBatches(table, 2, most), []  # type: ignore[arg-type]
    for _ in expected:
        rows = batches.next_of(np.arange(5))
        table.length[rows] += 1
        found.append(rows.tolist())
    assert found == expected


def test_rows_take_turns_and_keep_the_order_of_the_batch() -> None:
    table = SimpleNamespace(known=np.full(6, 4), length=np.full(6, 3), phase=np.full(6, Phase.DECODE))
    batches, decoding = MicroBatches(table, 2, 2), np.array([4, 0, 5, 2])  # type: ignore[arg-type]
    assert [batches.next_of(decoding).tolist() for _ in range(3)] == [[0, 2], [4, 5], [0, 2]]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_decodes_fill_the_pipe(stages: int, overlap: bool) -> None:
    executor = PipelineExecutor(stages, rows=8, pages=400)
    bench = Bench(executor, disable_overlap_schedule=not overlap)
    prompts = {handle: [handle, 1] for handle in range(8)}
    for handle, prompt in prompts.items():
        bench.ask(handle, prompt, max_new_tokens=30)
    bench.run()
    assert bench.out.outputs == {handle: oracle(prompt, 30) for handle, prompt in prompts.items()}
    assert executor.most_in_flight == stages  # with decodes alone there is never one more to launch
    # All prompts are in the first step, and decodes begin behind it; from then on no stage waits.
    assert [executor.idle_ticks(stage) for stage in range(stages)] == [stages - 1] * stages
    assert {len(plan.rows) for plan in executor.plans[1:]} <= {8 // stages, -(-8 // stages)}


@pytest.mark.parametrize("stages", [2, 4])
def test_the_chunks_of_one_prompt_fill_the_pipe(stages: int) -> None:
    executor = PipelineExecutor(stages, chunk_tokens=4)
    bench = Bench(executor)
    bench.ask(1, list(range(48)), max_new_tokens=1)
    bench.run()
    assert len(executor.plans) == 12 and executor.most_in_flight == stages + 1
    assert [executor.idle_ticks(stage) for stage in range(stages)] == [0] * stages


def test_fewer_rows_than_stages_decode_one_by_one() -> None:
    executor = PipelineExecutor(4)
    bench = Bench(executor)
    bench.ask(1, [1, 2, 3], max_new_tokens=5)
    bench.run()
    assert bench.out.outputs[1] == oracle([1, 2, 3], 5) and executor.most_in_flight == 1


@pytest.mark.parametrize("jumps", [True, False])
def test_each_step_in_flight_has_masks_of_its_own(jumps: bool) -> None:
    executor = PipelineExecutor(3, pages=200)
    bench = Bench(executor, eos_ids=(EOS,), grammars=FakeGrammars(), disable_jump_forward=not jumps)
    for handle in range(7):
        bench.ask(handle, [handle, 2, 3], max_new_tokens=12, regex=grammar(PLACES))
    bench.run()
    masked = [plan for plan in executor.plans if plan.masked is not None]
    assert executor.most_in_flight > 1 and len(masked) > 1
    for handle in range(7):
        text = b"".join(PIECES[token] for token in bench.out.outputs[handle])
        assert len(text) == len(PLACES) and all(byte in place for byte, place in zip(text, PLACES, strict=True))
