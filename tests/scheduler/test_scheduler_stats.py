"""The figures of the progress line, above all the share of time in which a step was on the device."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.core.plan import BatchPlan
from bough.messages.requests import GetState
from bough.scheduler.stats import BusyShare
from tests.fakes.executor import Done, FakeExecutor
from tests.fakes.scheduler_bench import Bench


def share_of(*spans: tuple[float, float] | None, steps: int) -> float | None:
    busy = BusyShare(steps)
    for span in spans:
        busy.add(span)
    return busy.share


def test_the_share_is_of_the_time_from_step_to_step() -> None:
    first = [(10.0, 11.0), (11.0, 12.0), (14.0, 15.0)]
    assert share_of(*first[:2], steps=3) is None
    assert share_of(*first, steps=3) == pytest.approx(3 / 5)
    second = [(16.0, 17.0), (17.0, 18.0), (18.0, 19.0)]
    assert share_of(*first, *second, steps=3) == pytest.approx(3 / 4), "the second between the windows counts"
    assert share_of(*first, *second[:2], steps=3) == pytest.approx(3 / 5), "the last whole window"


def test_idle_time_does_not_count() -> None:
    busy = BusyShare(3)
    busy.add((10.0, 11.0))
    assert busy.share is None
    busy.pause()
    assert busy.share == 1.0, "better than nothing"
    busy.add((100.0, 101.0))
    busy.add((102.0, 103.0))
    assert busy.share == pytest.approx(3 / 4)


def test_executors_that_do_not_know_say_nothing() -> None:
    assert share_of(None, None, steps=1) is None


@given(steps=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30), window=st.integers(1, 5))
def test_a_share_is_between_none_and_all(steps: list[tuple[float, float]], window: int) -> None:
    busy, now = BusyShare(window), 0.0
    for gap, duration in steps:
        busy.add((now + gap, now + gap + duration))
        now += gap + duration
        assert busy.share is None or 0.0 <= busy.share <= 1.0


class HalfBusyExecutor(FakeExecutor):
    """Each step takes one second of every two."""

    def launch(self, plan: BatchPlan) -> Done:
        done = super().launch(plan)
        return Done(replace(done.result, device_span=(2.0 * plan.step, 2.0 * plan.step + 1.0)))


@pytest.mark.parametrize("interval", [4, 0])
def test_the_state_and_the_log_tell_it(interval: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bough")
    bench = Bench(HalfBusyExecutor(), decode_log_interval=interval)
    bench.submit(GetState(1))
    bench.ask(0, [1, 2, 3], max_new_tokens=50)
    bench.run()
    bench.submit(GetState(2))
    bench.turn()
    before, after = (reply.data["device_busy_share"] for reply in bench.out.replies)
    assert before is None
    assert after == pytest.approx(0.5, abs=0.02)
    assert ("device busy 50%" in caplog.text) == (interval > 0)


def test_seconds_on_the_device_by_what_was_done() -> None:
    bench = Bench(HalfBusyExecutor(chunk_tokens=16), enable_mixed_chunk=True)
    bench.ask(0, [*range(1, 31)], max_new_tokens=8)
    bench.turn(4)
    bench.ask(1, [40, 41], max_new_tokens=2)
    bench.run()
    bench.submit(GetState(1))
    bench.turn()
    spent = bench.out.replies[-1].data["forward_seconds"]
    assert spent["extend"] == 2 and spent["mixed"] == 1, "a prompt in two chunks, and one beside a decode"
    assert spent["decode"] == 6, "the first token of an answer comes with its prompt"
