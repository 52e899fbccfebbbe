"""Many requests at once: what need not wait for all of them to be looked into, and what must."""

from __future__ import annotations

from typing import Any

import pytest

from bough.core.finish import FinishAbort, FinishLength
from bough.core.plan import BatchPlan
from bough.messages.requests import Abort, FlushCache, GetState, Pause, Ping, Resume, Shutdown
from bough.scheduler.loop import FEW_TOKENS, TAKEN_AT_ONCE
from tests.fakes.boxes import generate
from tests.fakes.executor import Done, FakeExecutor
from tests.fakes.scheduler_bench import Bench

MANY = 600


def burst(executor: FakeExecutor | None = None, length: int = 4, **settings: Any) -> tuple[Bench, list[Ping]]:
    """A bench with many prompts in its inbox, and the pings that it will pass on."""
    bench = Bench(executor or FakeExecutor(rows=256, pages=2048, chunk_tokens=256), **settings)
    pings, tokens = list[Ping](), bench.out.tokens

    def pass_on(message: Any) -> None:
        (pings.append if isinstance(message, Ping) else tokens)(message)

    bench.out.tokens = pass_on  # type: ignore[method-assign]
    for handle in range(MANY):
        bench.ask(handle, [handle % 97, handle // 97, *range(length - 2)], max_new_tokens=0, names=("batch",))
    return bench, pings


def test_questions_and_aborts_do_not_wait_for_the_rest_of_a_burst() -> None:
    bench, pings = burst()
    bench.turn()
    assert 0 < len(bench.out.opened) < MANY / 2
    bench.submit(Ping(1), GetState(2), Abort(MANY - 1), Abort(name="r400"))
    bench.turn()
    assert pings == [Ping(1)] and bench.out.replies[-1].data["num_waiting_reqs"] > MANY / 2
    for handle in (MANY - 1, 400):
        reason = bench.out.ended.pop(handle)
        assert isinstance(reason, FinishAbort) and reason.status_code == 499
    bench.run()
    assert len(bench.out.ended) == MANY - 2
    assert all(isinstance(reason, FinishLength) for reason in bench.out.ended.values())


def test_an_abort_in_one_go_with_its_request_ends_it() -> None:
    bench, _ = burst()
    bench.submit(Abort(name="batch"))
    bench.run()
    assert len(bench.out.ended) == MANY
    assert all(isinstance(reason, FinishAbort) for reason in bench.out.ended.values())


def test_short_prompts_fill_a_step_and_of_long_ones_few_are_looked_into_before_it() -> None:
    bench, _ = burst()
    bench.turn()
    assert len(bench.out.opened) == 256 // 4 > TAKEN_AT_ONCE
    bench.turn()
    assert len(bench.out.ended) == 256 // 4
    bench, _ = burst(FakeExecutor(rows=64, pages=4096, chunk_tokens=64), length=40)
    bench.turn()
    assert len(bench.out.opened) == TAKEN_AT_ONCE


class Busy(FakeExecutor):
    """Its steps seem to run until somebody waits for them."""

    def launch(self, plan: BatchPlan) -> Done:
        return Running(super().launch(plan).result)


class Running(Done):
    def ready(self) -> bool:
        return False


@pytest.mark.parametrize(("executor", "steps"), [(Busy, 5), (FakeExecutor, 8)])
def test_while_a_step_runs_the_next_is_filled_with_what_is_not_cached(executor: type[FakeExecutor], steps: int) -> None:
    """256 prompts over four prefixes of 480 tokens, with 32 tokens of their own: 4.94 times 2,048 tokens."""
    limits = {"rows": 256, "pages": 32768, "context_length": 640, "chunk_tokens": 2048}
    bench = Bench(executor(**limits))  # type: ignore[arg-type]
    for handle in range(256):
        prefix = [handle % 4 + 1] * 480
        bench.ask(handle, [*prefix, 10 + handle // 4, *[9] * 31], max_new_tokens=2, ignore_eos=True)
    bench.run()
    prompts = [int(plan.given.sum()) for plan in bench.executor.plans if plan.given.any()]
    assert len(bench.out.ended) == 256 and sum(prompts) == 4 * 480 + 256 * 32
    assert len(prompts) == steps, prompts


def test_however_much_is_cached_a_turn_looks_into_some_hundreds_at_most() -> None:
    bench = Bench(Busy(rows=2000, pages=8000, context_length=512, chunk_tokens=8192))
    prompt = [5] * 300
    bench.ask(0, prompt, max_new_tokens=2)
    bench.run()
    for handle in range(1, 1001):
        bench.ask(handle, prompt, max_new_tokens=4)
    bench.turn()
    first = len(bench.out.opened)
    bench.turn()
    assert TAKEN_AT_ONCE < len(bench.out.opened) - first <= 8192 // FEW_TOKENS
    bench.run()
    assert len(bench.out.ended) == 1001


def test_an_urgent_request_behind_a_burst_is_served_next() -> None:
    bench, _ = burst(enable_priority_scheduling=True)
    bench.submit(generate(MANY, [1, 2], max_new_tokens=1, priority=5))
    bench.turn(3)
    assert bench.out.ended[MANY] == FinishLength(1) and len(bench.out.ended) < MANY / 2


def test_of_a_burst_no_more_wait_than_may() -> None:
    bench, _ = burst(max_queued_requests=40)
    bench.turn()
    refused = [reason for reason in bench.out.ended.values() if isinstance(reason, FinishAbort)]
    assert len(refused) == MANY - 40 and {reason.status_code for reason in refused} == {429}
    bench.run()
    assert len(bench.out.ended) == MANY


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_what_changes_the_engine_comes_behind_the_requests_before_it(mode: Any) -> None:
    bench, _ = burst()
    bench.submit(FlushCache(1), Pause(2, mode), generate(MANY, [1, 2], max_new_tokens=1))
    bench.turn(3)
    assert [(reply.call, reply.ok) for reply in bench.out.replies] == [(1, False), (2, True)]
    assert bench.out.opened == {*range(MANY + 1)} and not bench.out.ended
    bench.submit(Resume(3))
    bench.run()
    assert len(bench.out.ended) == MANY + 1


def test_at_the_end_each_of_a_burst_gets_an_answer() -> None:
    bench, _ = burst()
    bench.submit(Shutdown())
    bench.scheduler.run()
    assert len(bench.out.ended) == MANY and not bench.scheduler._arrived
