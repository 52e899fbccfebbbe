"""Decodes stand in the order of the tree, and a step says what neighbours read in common."""

from __future__ import annotations

import pytest

from bough.core.settings import MemorySettings
from tests.fakes.executor import FakeExecutor
from tests.fakes.scheduler_bench import Bench

SYSTEM = [1] * 8
PROMPTS = {1: [*SYSTEM, 5, 5, 1], 2: [9, 9, 2], 3: [*SYSTEM, 6, 6, 3], 4: [*SYSTEM, 5, 5, 4], 5: [9, 9, 5]}


def decode_plan(bench: Bench) -> tuple[list[int], list[int] | None]:
    """Who decodes in the last step, by handle, and what it says of neighbours."""
    plan = bench.executor.plans[-1]
    handles = [int(bench.scheduler._batch.table.handle[row]) for row in plan.rows]
    return handles, None if plan.common is None else plan.common.tolist()


def begin(bench: Bench, max_new_tokens: int = 20) -> Bench:
    for handle, prompt in PROMPTS.items():
        bench.ask(handle, prompt, max_new_tokens=max_new_tokens)
        bench.turn(2)
    bench.turn(2)
    return bench


def test_neighbours_share_what_they_have_in_the_tree() -> None:
    bench = begin(Bench(FakeExecutor(pages=200)))
    handles, common = decode_plan(bench)
    assert handles == [1, 4, 3, 2, 5] and common == [0, 10, 8, 0, 2]
    bench.turn()
    assert bench.executor.plans[-1].common is bench.executor.plans[-2].common, "nobody moved: nothing is worked out"
    bench.ask(6, [9, 9, 5, 5], max_new_tokens=20)
    bench.turn(4)
    assert decode_plan(bench) == ([1, 4, 3, 2, 5, 6], [0, 10, 8, 0, 2, 3])
    bench.run()


@pytest.mark.parametrize(
    "off", [{"disable_tree_attention": True}, {"memory": MemorySettings(disable_radix_cache=True)}]
)
def test_it_can_be_switched_off(off: dict[str, object]) -> None:
    bench = begin(Bench(FakeExecutor(pages=200), **off))  # type: ignore[arg-type]
    assert decode_plan(bench)[1] is None
    bench.run()
