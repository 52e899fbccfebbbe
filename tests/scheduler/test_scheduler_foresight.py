"""The next step is planned shortly before the running one ends, and who comes meanwhile is in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bough.core.plan import BatchPlan
from bough.messages.requests import Abort, Pause, Shutdown, ToScheduler
from bough.scheduler.foresight import LEAD_S, SURE
from tests.fakes.boxes import FakeInbox, generate
from tests.fakes.executor import Done, FakeExecutor, oracle
from tests.fakes.scheduler_bench import Bench

TOKEN_S = 0.01  # what a prompt token costs; decodes cost nothing
PROMPT = list(range(1, 13))


class SlowBench(Bench):
    """Time passes only for who waits for messages: until the next one is due, or in vain. It has seen a prompt, and
    with it what one costs."""

    def __init__(self, executor: SlowExecutor | None = None, *, launch_s: float = 0.0, **options: Any) -> None:
        chosen = executor or SlowExecutor(rows=4, pages=256, chunk_tokens=16, late_plans=True)
        super().__init__(chosen, **options)
        chosen.bench, chosen.launch_s = self, launch_s
        self.inbox = self.scheduler._inbox = SlowInbox(self)
        self.due: list[tuple[float, ToScheduler]] = []
        self.ask(0, PROMPT[::-1], max_new_tokens=1)
        self.run()


class SlowExecutor(FakeExecutor):
    """Begins a step when the one before has ended, and says how long it took; launching a prompt takes time too."""

    bench: SlowBench
    token_s = TOKEN_S
    launch_s = 0.0
    free_at = 0.0

    def launch(self, plan: BatchPlan) -> Done:
        step = super().launch(plan)
        assert step.result is not None
        began = max(self.free_at, self.bench.now)
        self.free_at = began + self.token_s * int(plan.given.sum())
        self.bench.now += self.launch_s if plan.given.any() else 0.0
        step.result = replace(step.result, device_span=(began, self.free_at))
        return step


class SlowInbox(FakeInbox):
    def __init__(self, bench: SlowBench) -> None:
        super().__init__()
        self.bench = bench

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        messages = super().receive(timeout_s)
        if messages or not timeout_s:
            return messages
        if self.bench.due and self.bench.due[0][0] <= self.bench.now + timeout_s:
            self.bench.now, message = self.bench.due.pop(0)
            return [message]
        self.bench.now += timeout_s
        return []


def test_who_comes_in_time_is_in_the_next_step() -> None:
    bench = SlowBench()
    seen = len(bench.executor.plans)
    bench.due = [(bench.now + TOKEN_S * len(PROMPT) / 2, generate(2, [9, 8, 7], max_new_tokens=2))]
    bench.ask(1, PROMPT, max_new_tokens=4)
    bench.run()
    first, second = bench.executor.plans[seen : seen + 2]
    assert len(first.rows) == 1 and len(second.rows) == 2
    assert bench.out.outputs[1] == oracle(PROMPT, 4)
    assert bench.out.outputs[2] == oracle([9, 8, 7], 2)


@pytest.mark.parametrize("launch_s", [0.0, 0.02])
def test_the_next_step_is_planned_before_the_running_one_ends(launch_s: float) -> None:
    bench = SlowBench(launch_s=launch_s)
    began = bench.now
    bench.ask(1, PROMPT, max_new_tokens=4)
    bench.turn(2)
    assert len(bench.executor.plans[-1].rows) == 1
    assert bench.now == pytest.approx(began + SURE * TOKEN_S * len(PROMPT) - LEAD_S - launch_s)


def test_a_full_step_waits_for_nobody() -> None:
    bench = SlowBench()
    for handle in (1, 2, 3):  # more than one step's worth
        bench.ask(handle, [handle, *PROMPT], max_new_tokens=1)
    began = bench.now
    bench.turn(2)
    assert bench.now == began
    bench.run()
    assert all(bench.out.outputs[h] == oracle([h, *PROMPT], 1) for h in (1, 2, 3))


def test_steps_whose_rows_are_all_taken_wait_for_nobody() -> None:
    bench = SlowBench(SlowExecutor(rows=1, pages=256, chunk_tokens=16, late_plans=True))
    began = bench.now
    bench.ask(1, PROMPT, max_new_tokens=3)
    bench.turn(2)
    assert bench.now == began


@pytest.mark.parametrize(("late_plans", "settings"), [(False, {}), (True, {"disable_overlap_schedule": True})])
def test_where_plans_are_not_late_or_steps_do_not_overlap_nobody_waits(
    late_plans: bool, settings: dict[str, Any]
) -> None:
    bench = SlowBench(SlowExecutor(rows=4, pages=256, chunk_tokens=16, late_plans=late_plans), **settings)
    began = bench.now
    bench.ask(1, PROMPT, max_new_tokens=3)
    bench.turn(3)
    assert bench.now == began


def test_a_shorter_step_is_believed_at_once_and_a_longer_one_slowly() -> None:
    executor = SlowExecutor(rows=4, pages=256, chunk_tokens=16, late_plans=True)
    bench = SlowBench(executor)

    def waited(handle: int, token_s: float) -> float:
        """After a prompt whose tokens take so long, the next is waited for as if each took so long."""
        executor.token_s = token_s
        bench.ask(handle, [handle, *PROMPT[1:]], max_new_tokens=1)
        bench.run()
        began = bench.now = bench.now + 10.0
        bench.ask(handle + 1, [handle + 1, *PROMPT[1:]], max_new_tokens=2)
        bench.turn(2)
        found = (bench.now - began + LEAD_S) / SURE / len(PROMPT)
        bench.run()
        return found

    assert waited(20, 0.005) == pytest.approx(0.005)
    assert 0.005 < waited(22, 0.02) < 0.01


@pytest.mark.parametrize("message", [Shutdown(), Pause(call=1, mode="in_place"), Abort(handle=1)])
def test_orders_are_obeyed_meanwhile(message: ToScheduler) -> None:
    bench = SlowBench()
    bench.ask(1, PROMPT, max_new_tokens=4)
    bench.turn()
    came = bench.now + 0.01
    bench.due = [(came, message)]
    launched = len(bench.executor.plans)
    if isinstance(message, Shutdown):
        bench.scheduler.run()
        assert bench.now == pytest.approx(came) and bench.out.ended[1] is not None
    elif isinstance(message, Pause):
        bench.turn()
        assert bench.now == pytest.approx(came) and bench.out.replies
    else:
        bench.run()
        assert bench.out.ended[1] is not None
    assert len(bench.executor.plans) <= launched + 1
