"""The next step is planned shortly before the running one ends, and who comes meanwhile is in it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.core.plan import BatchPlan, StepResult
from bough.messages.requests import Abort, Pause, Shutdown, ToScheduler
from bough.scheduler.loop import LONGEST_WAIT_S, SHORTEST_WAIT_S
from bough.scheduler.step_time import LEAD_S, SURE
from tests.fakes.boxes import FakeInbox, generate
from tests.fakes.executor import Done, FakeExecutor, oracle
from tests.fakes.scheduler_bench import Bench

STEP_S, TOKEN_S, DECODE_S = 0.004, 25e-6, 40e-6  # what a step costs, each prompt token and each decode in it
LONG = 2000  # tokens of a prompt from which something is learnt
NEAR = LONGEST_WAIT_S + SHORTEST_WAIT_S  # by which waiting ends too early


@dataclass
class SlowStep(Done):
    bench: SlowBench
    ends_at: float

    def ready(self) -> bool:
        return self.bench.now >= self.ends_at

    def wait(self) -> StepResult:
        self.bench.now = max(self.bench.now, self.ends_at)
        return super().wait()


class SlowExecutor(FakeExecutor):
    """A step begins when the one before has ended. The host is at work on a launch for `launch_s`; the next step is
    held up for `stall_s` more, and with it the device."""

    bench: SlowBench
    launch_s = stall_s = free_at = 0.0

    def launch(self, plan: BatchPlan) -> SlowStep:
        step = super().launch(plan)
        assert step.result is not None
        began = max(self.free_at, self.bench.now)
        self.bench.idle_s.append(began - self.free_at)
        self.bench.launched_at.append(self.bench.now)
        decodes = int((plan.given < plan.query_lens).sum())
        work_s = STEP_S + TOKEN_S * int(plan.given.sum()) + DECODE_S * decodes
        self.free_at = began + work_s + self.stall_s
        self.bench.now += self.launch_s + self.stall_s
        self.stall_s = 0.0
        return SlowStep(replace(step.result, device_span=(began, self.free_at)), self.bench, self.free_at)


class SlowInbox(FakeInbox):
    def __init__(self, bench: SlowBench) -> None:
        super().__init__()
        self.bench = bench

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        messages = super().receive(timeout_s)
        while self.bench.due and self.bench.due[0][0] <= self.bench.now:
            messages.append(self.bench.due.pop(0)[1])
        if messages or not timeout_s:
            return messages
        if self.bench.due and self.bench.due[0][0] <= self.bench.now + timeout_s:
            self.bench.now, message = self.bench.due.pop(0)
            return [message]
        self.bench.now += timeout_s
        return []


class SlowBench(Bench):
    """Time passes for who waits: for messages (those that are `due`, or in vain), or for a step. By default it has seen
    a long prompt, and with it what prompts cost."""

    def __init__(self, *, seen: int = LONG, late: bool = True, rows: int = 64, **settings: Any) -> None:
        executor = SlowExecutor(
            rows=rows, pages=60_000, context_length=16_384, chunk_tokens=8192, even_tokens=512, late_plans=late
        )
        super().__init__(executor, **settings)
        executor.bench = self
        self.device = executor
        self.inbox = self.scheduler._inbox = SlowInbox(self)
        self.due: list[tuple[float, ToScheduler]] = []
        self.idle_s: list[float] = []  # of the device, before each step
        self.launched_at: list[float] = []  # each step
        self.now = 1.0
        if seen:
            self.ask(0, prompt(seen, 0), max_new_tokens=3)
            self.run()

    def check(self) -> None:
        """The books of so many pages are not looked through after each turn."""


def prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 97, length)]


def step_s(prompt_tokens: int, decodes: int = 0) -> float:
    return STEP_S + TOKEN_S * prompt_tokens + DECODE_S * decodes


def test_who_comes_in_time_is_in_the_next_step() -> None:
    bench = SlowBench()
    seen = len(bench.executor.plans)
    first, second = prompt(LONG, 1), prompt(30, 2)
    bench.due = [(bench.now + 0.5 * step_s(LONG), generate(2, second, max_new_tokens=2))]
    bench.ask(1, first, max_new_tokens=4)
    bench.run()
    assert [len(plan.rows) for plan in bench.executor.plans[seen : seen + 2]] == [1, 2]
    assert bench.out.outputs[1] == oracle(first, 4)
    assert bench.out.outputs[2] == oracle(second, 2)


@pytest.mark.parametrize("launch_s", [0.0, 0.01])
def test_the_next_step_is_planned_before_the_running_one_ends(launch_s: float) -> None:
    bench = SlowBench()
    bench.device.launch_s = launch_s
    bench.ask(1, prompt(LONG, 1), max_new_tokens=2)
    bench.run()
    began = bench.now
    bench.ask(2, prompt(LONG, 2), max_new_tokens=4)
    bench.turn(2)
    due = began + SURE * step_s(LONG) - LEAD_S - launch_s
    assert due - NEAR < bench.launched_at[-1] <= due


def test_a_full_step_waits_for_nobody() -> None:
    bench = SlowBench()
    for handle in (1, 2, 3, 4):  # two steps and more
        bench.ask(handle, prompt(5000, handle), max_new_tokens=1)
    began = bench.now
    bench.turn(2)
    assert bench.launched_at[-2:] == [began, began]
    bench.run()
    assert all(bench.out.outputs[h] == oracle(prompt(5000, h), 1) for h in (1, 2, 3, 4))


@pytest.mark.parametrize("followed", [True, False])
def test_a_step_waits_for_the_rest_of_a_burst_of_which_much_is_cached(followed: bool) -> None:
    """Were nothing of the first ones cached, they would fill the step."""
    bench = SlowBench(rows=200)
    prefix, seen = prompt(1000, 1), len(bench.executor.plans)
    prompts = [prefix + prompt(60, handle) for handle in range(140)]
    for handle in range(20):
        bench.ask(handle + 1, prompts[handle], max_new_tokens=2, followed=followed)
    for handle in range(20, 140):
        came = bench.now + 0.001 * (1 + handle // 16)
        rest = generate(handle + 1, prompts[handle], max_new_tokens=2, followed=followed and handle < 139)
        bench.due.append((came, rest))
    bench.run()
    first, second = (len(plan.rows) for plan in bench.executor.plans[seen : seen + 2])
    assert first == 20 and (second == 140 if followed else second < 60)
    assert all(bench.out.outputs[handle + 1] == oracle(each, 2) for handle, each in enumerate(prompts))


def test_steps_whose_rows_are_all_taken_wait_for_nobody() -> None:
    bench = SlowBench(rows=3)
    for handle in (1, 2):
        bench.ask(handle, prompt(LONG, handle), max_new_tokens=20)
    bench.turn()
    bench.ask(3, prompt(LONG, 3), max_new_tokens=3)  # takes the last row there is
    began = bench.now
    bench.turn()
    assert bench.launched_at[-1] == began


@pytest.mark.parametrize(("late", "settings"), [(False, {}), (True, {"disable_overlap_schedule": True})])
def test_where_plans_are_not_late_or_steps_do_not_overlap_who_comes_must_wait(
    late: bool, settings: dict[str, Any]
) -> None:
    bench = SlowBench(late=late, **settings)
    seen = len(bench.executor.plans)
    bench.due = [(bench.now + 0.5 * step_s(LONG), generate(2, prompt(30, 2), max_new_tokens=2))]
    bench.ask(1, prompt(LONG, 1), max_new_tokens=4)
    bench.run()
    together = [len(plan.rows) for plan in bench.executor.plans[seen : seen + 3]]
    assert together == ([1, 2, 2] if settings else [1, 1, 2])


@pytest.mark.parametrize(
    ("before", "stall_s"),
    [
        ([8], 0.0),  # nothing is known but what eight tokens took
        ([300] * 11, 0.0),  # the same prompt: one token is computed
        ([300, 16], 0.3),  # while a graph is captured
        ([LONG, LONG], 3.0),  # while a kernel is compiled
    ],
)
def test_what_is_far_from_usual_is_not_believed(before: list[int], stall_s: float) -> None:
    bench = SlowBench(seen=0)
    for number, length in enumerate(before):
        if number == len(before) - 1:
            bench.device.stall_s = stall_s
        bench.ask(number, prompt(length, length), max_new_tokens=1 if length == 8 else 4)
        bench.run()
    began = bench.now
    bench.ask(50, prompt(7000, 50), max_new_tokens=2)
    while not bench.out.outputs[50]:
        bench.turn()
    assert bench.now - began == pytest.approx(step_s(7000), abs=NEAR)


def test_steps_with_prompts_show_that_decodes_have_become_quicker() -> None:
    bench = SlowBench()
    for handle in range(1, 41):
        bench.ask(handle, prompt(20, handle), max_new_tokens=30)
    bench.run()
    taken = []
    for handle in range(50, 54):
        began = bench.now
        bench.ask(handle, prompt(10, handle), max_new_tokens=1)
        while handle not in bench.out.ended:
            bench.turn()
        taken.append(bench.now - began)
    assert taken[1:] == pytest.approx([step_s(10)] * 3, abs=1e-4)  # a token may be cached


@pytest.mark.slow
@given(st.integers(0, 2**31))
def test_the_device_hardly_ever_waits(seed: int) -> None:
    """Whatever comes and whatever holds it up, the device waits no longer than it is looked for, and all are served."""
    rng = random.Random(seed)
    bench = SlowBench(seen=0)
    asked: dict[int, tuple[list[int], int]] = {}
    at = bench.now
    for handle in range(rng.randint(1, 25)):
        at += rng.choice([0.0, 0.003, 0.02, 0.05])
        asked[handle] = prompt(rng.choice([1, 8, 100, 700, 3000]), rng.randint(0, 9)), rng.randint(1, 12)
        stream = rng.random() < 0.5
        bench.due.append((at, generate(handle, asked[handle][0], max_new_tokens=asked[handle][1], stream=stream)))
    while len(bench.out.ended) < len(asked):
        if rng.random() < 0.1:
            bench.device.stall_s = rng.choice([0.01, 0.3, 3.0])
        if not bench.scheduler._requests and bench.due:  # nothing to do before the next one comes
            bench.now = max(bench.now, bench.due[0][0])
            bench.device.free_at = bench.now
        bench.turn()
    assert max(bench.idle_s) <= NEAR
    assert all(bench.out.outputs[h] == oracle(tokens, count) for h, (tokens, count) in asked.items())


@pytest.mark.parametrize("message", [Shutdown(), Pause(call=1, mode="in_place"), Abort(handle=1)])
def test_orders_are_obeyed_meanwhile(message: ToScheduler) -> None:
    bench = SlowBench()
    bench.ask(1, prompt(LONG, 1), max_new_tokens=4)
    bench.turn()
    bench.due = [(bench.now + 0.01, message)]
    handled: list[float] = []
    handle = bench.scheduler._handle

    def note(given: ToScheduler) -> None:
        handled.append(bench.now)
        handle(given)

    bench.scheduler._handle = note  # type: ignore[method-assign]
    came, launched = bench.due[0][0], len(bench.executor.plans)
    if isinstance(message, Shutdown):
        bench.scheduler.run()
    else:
        bench.turn()
    assert handled == [came]
    assert isinstance(message, Shutdown) or len(bench.executor.plans) == launched  # nothing more was planned for it
