"""How many drafts are worth their time: from what rows' drafts did, and from the times of steps."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bough.core.plan import Limits, StepResult
from bough.core.settings import DRAFTED_ROWS, Settings
from bough.scheduler.draft_lengths import PROBE, TRIALS, DraftLengths, StepTimes
from bough.scheduler.drafting import Drafting
from bough.scheduler.ngram import NgramProposer

ROWS = 8


def lengths(cost: Callable[[int], float], most: int = 256, **options: Any) -> DraftLengths:
    """With the times of all steps of up to 64 tokens known, with drafts and without; no row is near its bound."""
    table = SimpleNamespace(requests=[None] * ROWS, handle=np.arange(ROWS))
    chosen = DraftLengths(cast(Any, table), most, **{"adaptive": True, **options})
    for tokens in range(1, 65):
        for _ in range(TRIALS):
            if tokens <= ROWS:
                chosen.ran(np.arange(tokens), np.ones(tokens, dtype=np.int32), tokens, (0.0, cost(tokens)))
            if tokens > 1:
                chosen.ran(rows(0), ints(1), tokens, (0.0, cost(tokens)))
    for row in range(ROWS):
        chosen.choose(rows(row), ints(1))  # it has an owner
    chosen._ahead[:] = 100.0
    return chosen


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.intp)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def teach(chosen: DraftLengths, row: int, held: int, proposed: int, times: int = 40) -> None:
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
    assert any(chosen.choose(rows(0), ints(6))[0] for _ in range(PROBE + 2))


@pytest.mark.parametrize(("cost", "usual", "other"), [(0.0, 3, 0), (5.0, 0, 1)])
def test_now_and_then_a_step_goes_the_other_way_to_learn_its_time(cost: float, usual: int, other: int) -> None:
    chosen = lengths(lambda tokens: 1.0 + cost * tokens)
    taken = [int(chosen.choose(rows(0), ints(3))[0]) for _ in range(2 * (PROBE + 1))]
    assert taken.count(other) == 2 and taken.count(usual) == len(taken) - 2


def test_a_step_that_waited_for_something_is_not_held_against_drafts() -> None:
    chosen = lengths(lambda tokens: 1.0 + 0.1 * tokens)
    before = float(chosen._ahead[0])
    chosen.ran(rows(0), ints(1), 4, (0.0, 500.0))
    assert before - float(chosen._ahead[0]) < 2.0
    chosen.ran(rows(0), ints(4), 4, (0.0, 1.4))
    assert float(chosen._ahead[0]) > before


def test_no_step_has_more_drafts_than_it_may() -> None:
    chosen = lengths(lambda tokens: 1.0, most=10)
    assert chosen.choose(rows(*range(8)), ints(*[4] * 8)).sum() == 10
    everything = lengths(lambda tokens: float(tokens), adaptive=False)
    assert everything.choose(rows(0, 1), ints(4, 0)).tolist() == [4, 0]


def test_times_that_were_not_measured_follow_from_their_neighbours() -> None:
    times = StepTimes()
    for _ in range(TRIALS):
        times.observe(2, 1.0)
        times.observe(6, 3.0)
    assert [times.of(rows) for rows in (1, 2, 4, 6, 50)] == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])
    times.observe(6, 300.0)  # a step that waited for something
    assert times.of(6) < 4.0


def test_further_drafts_are_expected_to_cost_half_of_what_the_first_did() -> None:
    times = StepTimes()
    assert times.with_drafts(1, 3, 1.0) == [1.0] * 4
    for _ in range(TRIALS):
        times.observe(1, 9.0)  # of as many tokens as rows: not one with drafts
        times.observe(3, 2.0)
    assert times.with_drafts(1, 4, 1.0) == pytest.approx([1.0, 1.5, 2.0, 2.25, 2.5])
    assert times.with_drafts(3, 1, 1.0) == [1.0, 1.0]


def test_the_first_drafts_of_an_engine_come_one_by_one() -> None:
    """Their cost is unknown yet: next to nothing, or as much as a step."""
    table = SimpleNamespace(requests=[None] * ROWS, handle=np.arange(ROWS))
    chosen = DraftLengths(cast(Any, table), 256, adaptive=True)
    for _ in range(TRIALS):
        assert not chosen.knows_cost(1)
        chosen.ran(rows(0), ints(1), 1, (0.0, 1.0))
    assert chosen.knows_cost(1)
    for _ in range(TRIALS):
        assert chosen.choose(rows(0), ints(7), ints(18)).tolist() == [1]
        chosen.ran(rows(0), ints(2), 2, (0.0, 1.1))
    assert chosen.choose(rows(0), ints(7), ints(18)).tolist() == [7]


def test_a_row_that_has_lost_time_gets_no_drafts_and_holds_those_of_others_back() -> None:
    chosen = lengths(lambda tokens: 0.75 + 0.25 * tokens)
    teach(chosen, 0, held=6, proposed=6)
    assert chosen.choose(rows(0, 1), ints(6, 0)).tolist() == [6, 0]
    chosen._ahead[1] = -1.5  # of one step that it may be behind
    assert chosen.choose(rows(0, 1), ints(6, 0)).tolist() == [0, 0]
    chosen._ahead[:2] = -1.5, 100.0
    assert chosen.choose(rows(0, 1), ints(6, 0))[0] > 0, "what its drafts are likely to add counts"


def device_drafting(count: int, *, adaptive: bool = True, proposer: Any = None) -> Drafting:
    """Rows whose drafts the device makes, up to three, where no `proposer` does; the second is under a grammar, the
    third has three tokens left, one of them for a step of its own, and the fifth is under a slow grammar."""
    constraints = [SimpleNamespace(quick=row != 4) for row in range(count)]
    requests = [SimpleNamespace(count_drafts=lambda *counts: None, constraint=each) for each in constraints]
    table: Any = SimpleNamespace(requests=requests, handle=np.arange(count), serial=np.arange(count))
    table.constrained, table.max_new = np.arange(count) % 3 == 1, np.where(np.arange(count) == 2, 13, 100)
    table.sampled, table.request_in = np.full(count, 10), requests.__getitem__
    table.heeds_eos, table.has_stop_ids = np.arange(count) == 2, np.zeros(count, dtype=bool)
    drafts = 3 if proposer is None else 0
    limits = Limits(count, 1, (64,), 200, 100, 16, "test", drafts=drafts, adaptive_drafts=adaptive)
    return Drafting(table, limits, proposer, np.zeros(1 + limits.pages[0], dtype=np.bool_))


def test_drafts_of_the_device_are_for_rows_that_have_room() -> None:
    drafts = device_drafting(5, adaptive=False).decide(rows(0, 1, 2, 3, 4))
    assert drafts.widths.tolist() == [4, 4, 2, 4, 1] and drafts.some
    assert not drafts.given.any() and not len(drafts.tokens)
    assert not device_drafting(DRAFTED_ROWS + 1).decide(np.arange(DRAFTED_ROWS + 1)).some


class ModelStream:
    """Requests in batches one after another, beside a draft model whose drafts hold with a probability. A step without
    it takes 1."""

    def __init__(self, count: int, drafted: float) -> None:
        self._count, self._drafted, self._draw = count, drafted, random.Random(count)
        self.drafting = device_drafting(count)
        self._table: Any = self.drafting._table
        self._table.constrained[:] = self._table.heeds_eos[:] = False
        self._table.max_new, self._table.pages = np.full(count, 200), np.zeros((count, 1), dtype=np.int32)
        self.seconds = self.plain_seconds = 0.0
        self.kinds: list[tuple[int, bool]] = []  # of each step: the most tokens of a row; and whether it is plain

    def answer(self, holds: float, tokens: int = 190) -> float:
        """The speed against an engine without drafts."""
        began, every = self.seconds, np.arange(self._count)
        self._table.handle += 1000
        self._table.sampled[:] = 200 - tokens
        for row in every.tolist():
            self.drafting.begin(row, ints())
        while len(live := (self._table.sampled < 200).nonzero()[0]):
            drafts = self.drafting.decide(live)
            plain = self.drafting.leaves_out(live, [])
            self.kinds.append((int(drafts.widths.max()), plain))
            counts = np.array([self._held(int(width) - 1, holds) for width in drafts.widths], dtype=np.int32)
            span = self.seconds, self.seconds + (1.0 if plain else self._drafted)
            self.seconds = span[1]
            result: Any = SimpleNamespace(counts=counts, device_span=span)
            step: Any = SimpleNamespace(query_lens=drafts.widths, undrafted=plain)
            self.drafting.after_step(live, live, step, cast(StepResult, result), alone=True)
            self._table.sampled[live] += counts
        return tokens / (self.seconds - began)

    def _held(self, drafts: int, holds: float) -> int:
        return 1 + next((i for i in range(drafts) if self._draw.random() > holds), drafts)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(("drafted", "holds"), [(2.0, 0.0), (2.0, 0.3), (2.6, 0.6), (1.2, 0.0), (10.0, 0.9)])
def test_a_draft_model_that_does_not_pay_falls_asleep(count: int, drafted: float, holds: float) -> None:
    stream = ModelStream(count, drafted)
    speeds = [stream.answer(holds) for _ in range(40)]
    assert sum(speeds) > 0.985 * len(speeds) and min(speeds) > (0.94 if drafted < 3.0 else 0.85)
    assert stream.kinds[: TRIALS + 1] == [(1, True)] * (TRIALS + 1), "first it learns what plain steps take"
    assert sum(plain for _, plain in stream.kinds[TRIALS + 1 :]) > 0.95 * (len(stream.kinds) - TRIALS - 1)
    assert any(width > 1 for width, _ in stream.kinds[1500:]), "it is tried again some day"


@pytest.mark.parametrize("count", [1, 8])
def test_a_draft_model_that_pays_stays_awake_and_wakes_up(count: int) -> None:
    stream = ModelStream(count, 1.5)
    assert stream.answer(0.9) == 1.0, "first it learns what plain steps take"
    assert sorted(stream.answer(0.9) for _ in range(20))[4] > 1.5
    for _ in range(30):
        stream.answer(0.0)
    assert stream.drafting._lengths.resting
    assert max(stream.answer(0.9) for _ in range(40)) > 1.5


def test_a_draft_model_has_no_part_for_what_begins_behind_a_gap() -> None:
    """Pages whose request slept lack what the model would have computed; those of others do not, nor when they are
    computed anew."""
    drafting = device_drafting(3)
    table: Any = drafting._table
    table.pages, table.length = np.arange(1, 31).reshape(3, 10), np.array([3, 3, 3])
    drafting._asleep[1] = True
    drafting.grew(rows(0, 1), ints(1, 1), ints(3, 13), ints(1, 1))
    drafting.begin(2, ints(1, 2, 3))
    assert not drafting.leaves_out(rows(2), [])
    assert not drafting.leaves_out(rows(1), [2])
    drafting.begin(2, ints(12, 13))
    assert drafting.leaves_out(rows(1), [2])
    drafting.grew(rows(0), 3, ints(13), 1)
    drafting.begin(2, ints(12, 13))
    assert not drafting.leaves_out(rows(2), [])


def test_what_is_computed_after_a_flush_lacks_nothing() -> None:
    """What all prompts begin with would have all of them do without the draft model for as long as it is cached."""
    drafting = device_drafting(2)
    drafting._lengths._rest = 100
    drafting.begin(0, ints(), first=True)
    drafting.begin(1, ints())
    assert not drafting.leaves_out(rows(0), []) and drafting.leaves_out(rows(1), [])


def test_what_a_device_waits_for_is_part_of_a_step_and_a_pause_is_not() -> None:
    chosen = device_drafting(1)._lengths
    for step in range(TRIALS + 1):
        span = step + 0.5, step + 1.0  # half a second of waiting before each
        chosen.ran(rows(0), ints(1), 1, span, plain=True)
    assert chosen._without.of(1) == 1.0
    chosen.ran(rows(0), ints(1), 1, (100.0, 100.5), plain=True)
    assert chosen._without.of(1) == 0.5


def test_searches_in_vain_are_made_less_often_where_steps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    for step_s, most in ((1e-3, 60), (10.0, 1)):
        proposer: Any = SimpleNamespace(propose=lambda *_: (ints(), 0), most=3, adaptive=True)
        drafting, clock, searches = device_drafting(1, proposer=proposer), iter(range(10_000)), 0
        monkeypatch.setattr(time, "perf_counter", lambda clock=clock: 1e-3 * next(clock))
        table: Any = drafting._table
        table.known, table.prompt_len = np.full(1, 20), np.full(1, 10)
        table.tokens = np.zeros((1, 30), dtype=np.int32)
        table.requests[0].namespace = ""
        for step in range(600):
            searches += drafting._pause == 0
            assert not drafting.decide(rows(0)).some
            drafting._lengths.ran(rows(0), ints(1), 1, (step * step_s, (step + 1) * step_s))
        assert searches == 600 if most == 1 else 600 / most <= searches <= 20


class Stream:
    """Requests whose answers are known, on an engine of which the time of a step is known."""

    def __init__(self, texts: list[list[int]], prompt: int, cost: Callable[[int], float]) -> None:
        count, self._texts, self._cost = len(texts), np.array(texts, dtype=np.int32), cost
        requests = [SimpleNamespace(constraint=None, namespace="", count_drafts=lambda *counts: None)] * count
        table: Any = SimpleNamespace(requests=requests, handle=np.arange(count), serial=np.arange(count))
        table.constrained, table.request_in = np.zeros(count, dtype=bool), requests.__getitem__
        table.heeds_eos = table.has_stop_ids = table.constrained
        table.tokens, table.prompt_len = self._texts, np.full(count, prompt)
        table.known, table.sampled = np.full(count, prompt + 1), np.ones(count, dtype=np.int32)
        table.max_new = np.full(count, len(texts[0]) - prompt)
        settings = Settings.from_flat({"speculative_algorithm": "NGRAM", "speculative_ngram_capacity": 0})
        limits = Limits(count, 1, (64,), 4096, 1000, 64, "test")
        lacking = np.zeros(1 + limits.pages[0], dtype=np.bool_)
        self._table, self._drafting = table, Drafting(table, limits, NgramProposer(settings.speculative), lacking)
        self.seconds = 0.0  # that it has taken

    def without(self) -> float:
        """The seconds it takes without drafts."""
        rows, length = self._texts.shape
        return (length - int(self._table.prompt_len[0]) - 1) * self._cost(rows)

    def run(self) -> None:
        """Each step is planned before the one before it is known."""
        table, length = self._table, self._texts.shape[1]
        held, at, unread = np.ones(len(self._texts), dtype=np.int32), table.known.copy(), None
        while len(live := (at < length).nonzero()[0]):
            drafts = self._drafting.decide(live)
            spare, ends = np.zeros_like(drafts.given) if drafts.spare is None else drafts.spare, 0
            for i, row in enumerate(live.tolist()):
                ends += int(drafts.given[i] + spare[i])
                first = ends - int(drafts.given[i] + spare[i]) + min(int(held[row]) - 1, int(spare[i]))
                guess = drafts.tokens[first : first + int(drafts.given[i])]
                wanted = self._texts[row, at[row] : at[row] + len(guess)]
                right = int((guess[: len(wanted)] == wanted).cumprod().sum())
                held[row] = min(1 + right, length - at[row])
            began, tokens = self.seconds, int(drafts.widths.sum())
            self.seconds += self._cost(tokens)
            table.sampled[live] += drafts.widths
            at[live] += held[live]
            step = live, drafts.widths, held[live], (began, self.seconds)
            if unread is not None:
                self._read(*unread)
            unread = step

    def _read(self, rows: Any, widths: Any, counts: Any, span: tuple[float, float]) -> None:
        result: Any = SimpleNamespace(counts=counts, device_span=span)
        plan: Any = SimpleNamespace(query_lens=widths, undrafted=False)
        self._drafting.after_step(rows, rows, plan, result, alone=True)
        self._table.sampled[rows] += counts - widths
        self._table.known[rows] += counts


def text(kind: str, seed: int) -> list[int]:
    """A prompt of 150 tokens and an answer of 300: copied but for some tokens, or of words that follow each other often
    and seldom go on alike."""
    draw = random.Random(seed)
    prompt = [draw.randrange(1000) for _ in range(150)]
    if kind == "copied":
        return prompt + [token if draw.random() > 0.02 else 1000 + draw.randrange(99) for token in prompt * 2]
    answer = prompt[:2]
    while len(answer) < 450:
        answer.append((7 * answer[-1] + 3 * answer[-2] + draw.randrange(4)) % 60)
    return answer


COSTS: dict[str, Callable[[int], float]] = {
    "cpu": lambda tokens: 7.5 + 2.5 * tokens,
    "slow cpu": lambda tokens: 6.0 + 4.0 * tokens,
    "host": lambda tokens: 0.5 if tokens <= 8 else 0.5 + 0.002 * tokens,
    "jump": lambda tokens: 0.5 if tokens in (1, 4) else 0.8,  # with drafts the device has other kernels
}


@pytest.fixture
def quick_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-6 * next(clock))


@pytest.mark.parametrize("cost", list(COSTS))
@pytest.mark.parametrize("kinds", [("words",), ("words",) * 4, ("copied", "words", "words", "words")])
def test_drafts_that_seldom_hold_cost_no_stream_much(cost: str, kinds: tuple[str, ...], quick_searches: None) -> None:
    for seed in range(4):
        stream = Stream([text(kind, 10 * seed + i) for i, kind in enumerate(kinds)], 150, COSTS[cost])
        stream.run()
        assert stream.without() >= 0.97 * stream.seconds


@pytest.mark.parametrize(("cost", "least"), [("cpu", 2.0), ("slow cpu", 1.5), ("host", 4.0), ("jump", 2.5)])
def test_a_copied_text_is_fast(cost: str, least: float, quick_searches: None) -> None:
    for seed in range(4):
        stream = Stream([text("copied", seed)], 150, COSTS[cost])
        stream.run()
        assert stream.without() >= least * stream.seconds
