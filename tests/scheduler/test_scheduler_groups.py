"""KV groups beside full attention: rows keep their window alone, and states are shared where a chunk ended."""

from __future__ import annotations

import pytest

from bough.core.model_config import KVGroup
from bough.core.settings import MemorySettings
from tests.fakes.executor import FakeExecutor, GuessingProposer, oracle
from tests.fakes.scheduler_bench import Bench


@pytest.mark.parametrize("page_size", [1, 4])
def test_many_long_rows_fit_in_a_window_pool_that_holds_a_fraction_of_their_tokens(page_size: int) -> None:
    """Eight rows of 60 tokens: 480 of full attention, 8 * (8 + what a row keeps beyond) of the window."""
    window = (KVGroup("window", 8), 8 * (8 // page_size + 3) + 16 // page_size)
    executor = FakeExecutor(pages=512 // page_size, page_size=page_size, groups=[window])
    bench = Bench(executor)
    prompts = {handle: [handle, *range(19)] for handle in range(8)}
    for handle, prompt in prompts.items():
        bench.ask(handle, prompt, max_new_tokens=40)
    bench.run()
    assert bench.out.outputs == {handle: oracle(prompt, 40) for handle, prompt in prompts.items()}
    assert bench.scheduler._planner.retraction.retracted == 0


def test_a_prefix_is_reused_while_the_window_before_its_end_is_cached() -> None:
    bench = Bench(FakeExecutor(groups=[(KVGroup("window", 4), 30)]))
    system = [5, 6, 7, 8, 9, 10, 11, 12]
    for handle, tail in enumerate([[1], [2, 3], [1, 4]]):
        bench.ask(handle, [*system, *tail], max_new_tokens=2)
        bench.run()
    # The second shares the system prompt, the third also what the first went on with.
    assert [bench.out.started[handle].cached_tokens for handle in range(3)] == [0, 8, 9]


def test_a_prefix_without_its_window_is_computed_again() -> None:
    """Twelve pages of the window: the second request evicts those of the first, whose full attention stays cached."""
    bench = Bench(FakeExecutor(pages=200, groups=[(KVGroup("window", 4), 12)]))
    for handle, prompt in enumerate([[1] * 9, [2] * 30, [1] * 9]):
        bench.ask(handle, prompt, max_new_tokens=1)
        bench.run()
        assert bench.out.outputs[handle] == oracle(prompt, 1)
    assert bench.out.started[2].cached_tokens == 0
    assert bench.scheduler._cache.evicted == 0


@pytest.mark.parametrize("page_size", [1, 2])
def test_a_state_is_shared_where_a_chunk_ended(page_size: int) -> None:
    """Chunks of 16 tokens: the second request begins with the state behind the first chunk, and leaves one where it
    branches off, with which the third begins."""
    executor = FakeExecutor(page_size=page_size, groups=[(KVGroup("state"), 20)])
    bench = Bench(executor)
    begin = [3] * 20
    for handle, tail in enumerate([[1, 2], [4, 5], [6, 7]]):
        bench.ask(handle, [*begin, *tail], max_new_tokens=6)
        bench.run()
        assert bench.out.outputs[handle] == oracle([*begin, *tail], 6)
    assert [bench.out.started[handle].cached_tokens for handle in range(3)] == [0, 16, 20]
    assert executor.states[0].begun_from_copies == 2


def test_requests_of_one_plan_do_not_read_a_state_that_the_plan_makes() -> None:
    """Two equal prompts arrive together: full attention could share in the same plan, a state cannot."""
    executor = FakeExecutor(chunk_tokens=32, groups=[(KVGroup("state"), 20)])
    bench = Bench(executor)
    for handle in range(2):
        bench.ask(handle, [3] * 12, max_new_tokens=4)
    bench.run()
    assert [bench.out.outputs[handle] for handle in range(2)] == [oracle([3] * 12, 4)] * 2
    assert executor.states[0].begun_from_copies == 0


def test_without_a_radix_cache_nothing_is_copied() -> None:
    executor = FakeExecutor(groups=[(KVGroup("window", 4), 40), (KVGroup("state"), 20)])
    bench = Bench(executor, memory=MemorySettings(disable_radix_cache=True))
    for handle in range(2):
        bench.ask(handle, [3] * 20, max_new_tokens=4)
        bench.run()
    assert not any(len(plan.new_pages[2]) for plan in executor.plans)
    assert bench.scheduler._cache.groups[0].available == 40


def test_decodes_with_states_have_no_drafts() -> None:
    executor = FakeExecutor(groups=[(KVGroup("state"), 20)])
    bench = Bench(executor, proposer=GuessingProposer(3))
    bench.ask(0, [3] * 12, max_new_tokens=8)
    bench.run()
    assert bench.out.outputs[0] == oracle([3] * 12, 8)
    assert max(int(plan.query_lens.max()) for plan in executor.plans if not len(plan.tokens)) == 1


def test_a_prompt_is_cut_where_it_branches_off_only_if_a_state_can_be_kept_there() -> None:
    """Steps with prompts, of equal beginnings: of the first, and of the second with memory for a copy and without."""
    steps = []
    for spare in (4, 0):
        executor = FakeExecutor(rows=2, chunk_tokens=40, groups=[(KVGroup("state"), 2 + spare)])
        bench = Bench(executor)
        for handle in range(2):
            bench.ask(handle, [*[3] * 20, handle, 9], max_new_tokens=2)
            bench.run()
            assert bench.out.outputs[handle] == oracle([*[3] * 20, handle, 9], 2)
        steps.append(sum(len(plan.tokens) > 0 for plan in executor.plans))
    assert steps == [3, 2]
