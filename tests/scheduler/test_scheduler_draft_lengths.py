"""How many drafts are worth their time: from what rows' drafts did, and from the times of steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bough.core.plan import Limits, StepResult
from bough.core.settings import DRAFTED_ROWS
from bough.scheduler.draft_lengths import PROBE, TRIALS, DraftLengths, StepTimes
from bough.scheduler.drafting import Drafting

ROWS = 8


def lengths(cost: Callable[[int], float], most: int = 256, **options: Any) -> DraftLengths:
    """With the times of all steps of up to 64 tokens known."""
    table = SimpleNamespace(requests=[None] * ROWS, handle=np.arange(ROWS))
    chosen = DraftLengths(cast(Any, table), most, **{"adaptive": True, **options})
    for tokens in range(1, 65):
        for _ in range(TRIALS):
            chosen.ran(tokens, (0.0, cost(tokens)))
    return chosen


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.intp)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def teach(chosen: DraftLengths, row: int, held: int, proposed: int, times: int = 40) -> None:
    chosen.choose(rows(row), ints(1))  # it has an owner
    for _ in range(times):
        chosen.observe(rows(row), ints(proposed), ints(held))


def test_free_drafts_are_all_taken_and_dear_ones_are_not() -> None:
    assert lengths(lambda tokens: 1.0).choose(rows(0), ints(5)).tolist() == [5]
    assert lengths(lambda tokens: float(tokens)).choose(rows(0), ints(5)).tolist() == [0]


def test_a_row_whose_drafts_hold_gets_more_than_one_whose_do_not() -> None:
    chosen = lengths(lambda tokens: 1.0 + 0.2 * tokens)
    teach(chosen, 0, held=4, proposed=4)
    teach(chosen, 1, held=0, proposed=4)
    good, bad = chosen.choose(rows(0, 1), ints(6, 6)).tolist()
    assert good == 6 and bad == 0


def test_drafts_of_a_tree_cost_as_much_as_those_of_a_chain_and_add_less() -> None:
    chain, tree = (lengths(lambda tokens: 1.0 + tokens, levels=levels) for levels in (1.0, 0.5))
    teach(chain, 0, held=8, proposed=8)
    teach(tree, 0, held=4, proposed=8)  # all four levels
    assert [int(chosen.choose(rows(0), ints(8))[0]) for chosen in (chain, tree)] == [8, 0]
    cheap = lengths(lambda tokens: 1.0 + 0.1 * tokens, levels=0.5)
    teach(cheap, 0, held=4, proposed=8)
    assert cheap.choose(rows(0), ints(8)).tolist() == [8]
    teach(cheap, 0, held=1, proposed=8)
    assert cheap._hold[0] == pytest.approx(0.5, abs=0.01), "one level holds, and the next does not"


def test_a_guess_that_was_right_for_long_needs_no_luck_of_the_row() -> None:
    """A request that has had no drafts yet, where a step of 8 tokens takes 2.75 times as long as one of one: JSON on a
    CPU."""
    chosen = lengths(lambda tokens: 0.75 + 0.25 * tokens)
    assert chosen.choose(rows(0), ints(7), ints(18))[0] > 3
    assert chosen.choose(rows(0), ints(7), ints(2))[0] < 3
    teach(chosen, 0, held=0, proposed=4)
    assert chosen.choose(rows(0), ints(7), ints(2)).tolist() == [0]


def test_a_row_with_another_owner_begins_anew() -> None:
    chosen = lengths(lambda tokens: 1.0 + 0.2 * tokens)
    teach(chosen, 0, held=0, proposed=4)
    assert chosen.choose(rows(0), ints(6)).tolist() == [0]
    cast(Any, chosen)._table.handle[0] = 77
    assert chosen.choose(rows(0), ints(6))[0] > 0


def test_a_row_without_luck_is_tried_again_some_day() -> None:
    chosen = lengths(lambda tokens: 1.0 + 0.2 * tokens)
    teach(chosen, 0, held=0, proposed=4)
    assert any(chosen.choose(rows(0), ints(6))[0] for _ in range(200))


@pytest.mark.parametrize(("cost", "usual", "other"), [(0.0, 3, 0), (5.0, 0, 3)])
def test_now_and_then_a_step_goes_the_other_way_to_learn_its_time(cost: float, usual: int, other: int) -> None:
    chosen = lengths(lambda tokens: 1.0 + cost * tokens)
    taken = [int(chosen.choose(rows(0), ints(3))[0]) for _ in range(2 * (PROBE + 1))]
    assert taken.count(other) == 2 and taken.count(usual) == len(taken) - 2


def test_no_step_has_more_drafts_than_it_may() -> None:
    chosen = lengths(lambda tokens: 1.0, most=10)
    assert chosen.choose(rows(*range(8)), ints(*[4] * 8)).sum() == 10
    everything = lengths(lambda tokens: float(tokens), adaptive=False)
    assert everything.choose(rows(0, 1), ints(4, 0)).tolist() == [4, 0]


def test_times_that_were_not_measured_follow_from_their_neighbours() -> None:
    times = StepTimes()
    assert times.of(np.array([1, 9])).tolist() == [1.0, 1.0]
    for _ in range(TRIALS):
        times.observe(2, 1.0)
        times.observe(6, 3.0)
    assert times.of(np.array([1, 2, 4, 6, 50])).tolist() == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])
    times.observe(6, 300.0)  # a step that waited for something
    assert times.of(np.array([6]))[0] < 4.0


def device_drafting(count: int, *, adaptive: bool = True) -> Drafting:
    """Rows whose drafts the device makes, up to three; the second is under a grammar, the third has three tokens left,
    one of them for a step of its own, and the fifth is under a slow grammar."""
    constraints = [SimpleNamespace(quick=row != 4) for row in range(count)]
    requests = [SimpleNamespace(count_drafts=lambda *counts: None, constraint=each) for each in constraints]
    table: Any = SimpleNamespace(requests=requests, handle=np.arange(count), serial=np.arange(count))
    table.constrained, table.max_new = np.arange(count) % 3 == 1, np.where(np.arange(count) == 2, 13, 100)
    table.sampled, table.request_in = np.full(count, 10), requests.__getitem__
    table.heeds_eos, table.has_stop_ids = np.arange(count) == 2, np.zeros(count, dtype=bool)
    limits = Limits(count, 1, (64,), 200, 100, 16, "test", drafts=3, adaptive_drafts=adaptive)
    return Drafting(table, limits, None)


def test_drafts_of_the_device_are_for_rows_that_have_room() -> None:
    drafts = device_drafting(5, adaptive=False).decide(rows(0, 1, 2, 3, 4))
    assert drafts.widths.tolist() == [4, 4, 2, 4, 1] and drafts.some
    assert not drafts.given.any() and not len(drafts.tokens)
    assert not device_drafting(DRAFTED_ROWS + 1).decide(np.arange(DRAFTED_ROWS + 1)).some


def test_drafts_of_the_device_that_never_hold_are_given_up() -> None:
    drafting, widths = device_drafting(1), []
    for _ in range(60):
        widths.append(int(drafting.decide(rows(0)).widths[0]))
        result: Any = SimpleNamespace(counts=ints(1))
        drafting.after_step(rows(0), np.zeros(1, dtype=np.int64), ints(widths[-1]), cast(StepResult, result))
        drafting.ran(widths[-1], (0.0, 1.0 + 0.3 * widths[-1]))
    assert widths[:TRIALS] == [1] * TRIALS, "first it learns what steps without drafts take"
    assert widths[TRIALS] == 4 and widths[20:].count(1) > 30


def test_what_a_device_waits_for_is_part_of_a_step_and_a_pause_is_not() -> None:
    drafting = device_drafting(1)
    for step in range(TRIALS):
        drafting.ran(1, (step + 0.5, step + 1.0))  # half a second of waiting before each, and of computing
    times = drafting._lengths._times
    assert times.of(np.array([1]))[0] == 1.0
    drafting.ran(1, (100.0, 100.5))
    assert times.of(np.array([1]))[0] == 0.5


def test_searches_in_vain_are_made_less_often_where_steps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    for step_s, most in ((1e-3, 60), (10.0, 1)):
        drafting, clock, searches = device_drafting(1), iter(range(10_000)), 0
        monkeypatch.setattr(time, "perf_counter", lambda clock=clock: 1e-3 * next(clock))
        proposer: Any = SimpleNamespace(propose=lambda *_: (ints(), 0), most=3, adaptive=True)
        drafting._proposer = proposer
        table: Any = drafting._table
        table.known, table.prompt_len = np.full(1, 20), np.full(1, 10)
        table.tokens = np.zeros((1, 30), dtype=np.int32)
        table.requests[0].namespace = ""
        for step in range(600):
            searches += drafting._pause == 0
            assert not drafting.decide(rows(0)).some
            drafting.ran(1, (step * step_s, (step + 1) * step_s))
        assert searches == 600 if most == 1 else 600 / most <= searches <= 20
