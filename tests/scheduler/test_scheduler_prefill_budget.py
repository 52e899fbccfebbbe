"""How much of the prompts a step takes while streams run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.core.plan import BatchPlan
from bough.scheduler.step_time import PrefillBudget
from tests.fakes.executor import Done, FakeExecutor
from tests.fakes.scheduler_bench import Bench


def spans(pace: PrefillBudget, *steps: tuple[int, float]) -> PrefillBudget:
    """Steps of so many prompt tokens, and the seconds they took."""
    for tokens, seconds in steps:
        pace.observe(tokens, (100.0, 100.0 + seconds))
    return pace


def test_nothing_is_known_before_the_first_step_with_a_prompt() -> None:
    assert PrefillBudget(0.04, 8192, 1).budget(streaming=True) == 8192


def test_the_speed_that_gateways_are_told_is_that_of_prompts() -> None:
    assert PrefillBudget(0.04, 8192, 1).tokens_per_s is None
    assert spans(PrefillBudget(0.04, 8192, 1), (8192, 2.0)).tokens_per_s == pytest.approx(4096.0)


def test_short_steps_say_how_fast_prompts_are_likely() -> None:
    """An engine that gets all prompts from a store computes short ends alone, and must see when that takes longer: what
    any step takes is not the prompts'."""
    budget = PrefillBudget(0.04, 8192, 1)
    assert budget.likely_tokens_per_s is None
    assert spans(budget, (0, 0.005)).likely_tokens_per_s is None
    budget = spans(PrefillBudget(0.04, 8192, 1), (3, 0.004), (200, 0.01), (20, 0.004))
    assert budget.likely_tokens_per_s == pytest.approx(20_000.0)
    assert spans(budget, (0, 0.005), (0, 0.007)).likely_tokens_per_s == pytest.approx(40_000.0)
    assert spans(budget, (0, 0.01)).likely_tokens_per_s == pytest.approx(40_000.0), "the fastest such step"
    assert budget.tokens_per_s is None
    assert spans(budget, (8192, 0.2)).likely_tokens_per_s == budget.tokens_per_s == pytest.approx(40_960.0)


@pytest.mark.parametrize("decode_s", [0.0, 0.004, 0.009])
def test_a_short_step_that_takes_no_longer_than_one_without_prompts_is_not_believed(decode_s: float) -> None:
    budget = spans(PrefillBudget(0.04, 8192, 1), (8, 0.004), (0, decode_s))
    assert 1_999.0 <= (budget.likely_tokens_per_s or 0.0) <= 40_000.0
    assert spans(PrefillBudget(0.04, 8192, 1), (8, 0.0)).likely_tokens_per_s is None, "a clock that stands"


@pytest.mark.parametrize(
    ("tokens", "seconds", "budget"),
    [
        (8192, 0.2, 1638),  # a large model: cut
        (8192, 0.02, 8192),  # a small one: need not be
        (8192, 2.0, 1024),  # a slow device: not below an eighth
    ],
)
def test_the_budget_follows_what_steps_take(tokens: int, seconds: float, budget: int) -> None:
    pace = spans(PrefillBudget(0.04, 8192, 1), (tokens, seconds))
    assert pace.budget(streaming=True) == budget
    assert pace.budget(streaming=False) == 8192


def test_short_steps_and_steps_without_a_clock_teach_nothing() -> None:
    pace = spans(PrefillBudget(0.04, 8192, 1), (8192, 0.2), (10, 5.0))
    pace.observe(8192, None)
    assert pace.budget(streaming=True) == 1638


def test_steps_that_may_have_waited_for_pages_teach_only_that_prompts_are_faster() -> None:
    pace = spans(PrefillBudget(0.04, 8192, 1), (8192, 0.2))
    for _ in range(30):
        pace.observe(8192, (0.0, 0.4), loads=True)
    assert pace.budget(streaming=True) == 1638
    for _ in range(30):
        pace.observe(8192, (0.0, 0.1), loads=True)
    assert pace.budget(streaming=True) == pytest.approx(3276, abs=2)


def test_it_forgets_slowly() -> None:
    pace = spans(PrefillBudget(0.04, 8192, 1), (8192, 0.2), (4096, 0.2))
    assert 1024 < pace.budget(streaming=True) < 1638
    assert spans(pace, *[(4096, 0.2)] * 30).budget(streaming=True) == 1024


@pytest.mark.parametrize("decodes", [0, 1, 60, 128, 170, 200, 400])
@pytest.mark.parametrize("before", [[], [(8192, 0.18)]])
@pytest.mark.parametrize("delay_s", [0.35, 3.0])
def test_a_step_that_was_held_up_is_forgotten(before: list[tuple[int, float]], delay_s: float, decodes: int) -> None:
    undisturbed = spans(PrefillBudget(0.04, 8192, 1, 512), (8192, 0.18))
    pace = spans(PrefillBudget(0.04, 8192, 1, 512), *before, (1024, delay_s))
    for _ in range(30):
        cut = pace.budget(streaming=True, decodes=decodes)
        spans(pace, (cut, cut * 0.18 / 8192))
    assert pace.budget(streaming=True, decodes=decodes) == undisturbed.budget(streaming=True, decodes=decodes)


@given(
    most=st.integers(1, 10_000),
    page_size=st.sampled_from([1, 2, 16, 128]),
    even=st.sampled_from([1, 512]),
    decodes=st.integers(0, 600),
    crowded=st.booleans(),
)
def test_steps_as_short_as_they_are_cut_teach(
    most: int, page_size: int, even: int, decodes: int, crowded: bool
) -> None:
    pace = spans(PrefillBudget(0.04, most, page_size, even), (most, 60.0), (0, 0.01), (0, 60.0))
    slow = cut = pace.budget(streaming=True, decodes=decodes, crowded=crowded)
    for _ in range(80):
        whole_pages = max(cut - cut % page_size, min(cut, page_size))
        spans(pace, (whole_pages, whole_pages * 1e-9), (0, 0.01))
        cut = pace.budget(streaming=True, decodes=decodes, crowded=crowded)
    assert cut == most >= slow


@pytest.mark.parametrize("first_s", [0.0, 1e-6, 1e-3])
def test_what_is_learnt_too_cheap_does_not_last(first_s: float) -> None:
    pace = spans(PrefillBudget(0.04, 8192, 1), (8192, first_s), *[(8192, 0.18)] * 3)
    assert pace.budget(streaming=True) < 5000


def test_a_step_that_was_held_up_counts_for_little() -> None:
    pace = spans(PrefillBudget(0.04, 8192, 1), (8192, 0.2), (1024, 3.0))
    assert pace.budget(streaming=True) == int(1638 / 1.3)


def test_without_a_target_every_step_takes_all() -> None:
    assert spans(PrefillBudget(0.0, 8192, 1), (8192, 2.0)).budget(streaming=True) == 8192


def test_a_page_always_fits() -> None:
    assert spans(PrefillBudget(0.04, 256, 64), (256, 60.0)).budget(streaming=True) == 64
    assert spans(PrefillBudget(0.04, 16, 64), (16, 60.0)).budget(streaming=True) == 16


def test_gaps_may_be_longer_while_requests_wait_for_long() -> None:
    pace = spans(PrefillBudget(0.04, 8192, 1), (8192, 0.2))
    assert pace.budget(streaming=True, crowded=True) == 2457
    assert pace.budget(streaming=False, crowded=True) == 8192


@pytest.mark.parametrize(
    ("seconds", "decodes", "budget"),
    [
        (0.2, 0, 1536),  # 1,638 tokens fit
        (0.2, 200, 2048 - 200),  # with 1,838, not much is missing
        (0.2, 100, 1536 - 100),
        (0.18, 3, 2048 - 3),
        (0.4, 40, 1024 - 40),  # the least counts the decodes as well
        (0.4, 500, 1536 - 500),
        (0.4, 250, 1024),  # 1,274: no even number is near
        (0.02, 7, 8192),  # nothing is cut, so nothing is evened
    ],
)
def test_a_step_has_an_even_number_of_tokens(seconds: float, decodes: int, budget: int) -> None:
    pace = spans(PrefillBudget(0.04, 8192, 1, even=512), (8192, seconds))
    assert pace.budget(streaming=True, decodes=decodes) == budget
    assert pace.budget(streaming=False, decodes=decodes) == 8192


@given(
    most=st.integers(1, 9000),
    page_size=st.sampled_from([1, 16, 600]),
    decodes=st.integers(0, 600),
    cost_us=st.integers(1, 10_000),
)
def test_evening_changes_little(most: int, page_size: int, decodes: int, cost_us: int) -> None:
    plain, evened = (
        spans(PrefillBudget(0.04, most, page_size, even), (most, 1e-6 * cost_us * most)) for even in (1, 512)
    )
    expected = plain.budget(streaming=True, decodes=decodes)
    found = evened.budget(streaming=True, decodes=decodes)
    assert min(most, page_size) <= found <= most
    assert expected / 1.2 <= found <= 1.15 * (expected + decodes) - decodes or found == expected
    assert (found + decodes) % 512 == 0 or found in (expected, most)


class SlowExecutor(FakeExecutor):
    """A prompt token takes it ten milliseconds."""

    def launch(self, plan: BatchPlan) -> Done:
        step = super().launch(plan)
        assert step.result is not None
        step.result = replace(step.result, device_span=(0.0, 0.01 * int(plan.given.sum())))
        return step


def test_steps_grow_while_a_request_waits_for_over_a_second() -> None:
    bench = Bench(SlowExecutor(rows=4, pages=512, context_length=256, chunk_tokens=64), stream_gap_target_ms=100)
    bench.ask(0, list(range(64)), max_new_tokens=1)
    bench.run()
    bench.ask(1, [7, 8, 9], max_new_tokens=60, stream=True)
    bench.turn(2)
    for handle in (2, 3):
        bench.ask(handle, [handle, *range(60)], max_new_tokens=1)
    bench.turn()
    assert bench.executor.plans[-1].given.sum() == 10
    bench.now += 1.5
    bench.turn()
    assert bench.executor.plans[-1].given.sum() == 15
    bench.run()


def test_steps_that_are_cut_are_even() -> None:
    executor = SlowExecutor(rows=4, pages=512, context_length=256, chunk_tokens=64, even_tokens=16)
    bench = Bench(executor, stream_gap_target_ms=300)
    bench.ask(0, list(range(64)), max_new_tokens=1)
    bench.run()
    for handle in (1, 2):
        bench.ask(handle, [7, 8, handle], max_new_tokens=60, stream=True)
    bench.turn(2)
    bench.ask(3, [3, *range(60)], max_new_tokens=1)
    bench.turn()
    plan = bench.executor.plans[-1]
    assert plan.given.sum() == 30 and plan.query_lens.sum() == 32
    bench.run()
