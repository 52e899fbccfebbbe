"""Rows stand in the order of the tree, and a step says what neighbours read in common."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bough.core.settings import MemorySettings
from tests.fakes.executor import FakeExecutor
from tests.fakes.scheduler_bench import Bench

SYSTEM = [1] * 8
PROMPTS = {1: [*SYSTEM, 5, 5, 1], 2: [9, 9, 2], 3: [*SYSTEM, 6, 6, 3], 4: [*SYSTEM, 5, 5, 4], 5: [9, 9, 5]}


def decode_plan(bench: Bench) -> tuple[list[int], list[int] | None]:
    """Who computes in the last step, by handle, and what it says of neighbours."""
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
    handles, common = decode_plan(bench)
    assert common is None
    assert handles == ([1, 4, 3, 2, 5] if "disable_tree_attention" in off else [1, 2, 3, 4, 5]), "still side by side"
    bench.run()


@pytest.mark.parametrize("shares", [True, False])
def test_chunks_of_prompts_share_what_was_cached_before_them(shares: bool) -> None:
    """Prompts that extend the same prefix stand side by side, behind a row that decodes. What one of them computes in
    this very step is read by the next alone."""
    bench = Bench(FakeExecutor(pages=200), disable_tree_attention=not shares)
    bench.ask(1, [*SYSTEM, 5, 5], max_new_tokens=40)
    bench.turn(3)
    prompts = {2: [*SYSTEM, 7, 2], 3: [9, 9, 3], 4: [*SYSTEM, 5, 5, 4], 5: [*SYSTEM, 7, 2, 5], 6: [*SYSTEM, 5, 5, 6, 6]}
    for handle, prompt in prompts.items():
        bench.ask(handle, prompt, max_new_tokens=2)
    bench.turn()
    handles, common = decode_plan(bench)
    assert handles[0] == 1 and sorted(handles[1:]) == [2, 3, 4, 5, 6]
    found = dict(zip(handles, common or [0] * 6, strict=True))
    sharing = [handle for handle in handles if handle in (2, 4, 5, 6)]
    places = [handles.index(handle) for handle in sharing]
    assert places == list(range(places[0], places[0] + 4)), "side by side"
    expected = [0, *(10 if {one, before} == {4, 6} else 8 for before, one in pairwise(sharing))]
    assert [found[handle] for handle in sharing] == (expected if shares else [0] * 4)
    assert found[1] == found[3] == 0
    bench.run()
