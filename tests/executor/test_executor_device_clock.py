"""Steps of the device on the host's clock: in order, after they were queued and before they were seen to be done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.executor.cuda_steps import StepPlacement

DURATIONS = st.floats(0.0, 0.1)


def test_steps_follow_each_other() -> None:
    placement = StepPlacement(10.0)
    assert placement.place(0.5, 0.2, 10.1, 11.0) == pytest.approx((10.5, 10.7))
    assert placement.place(0.0, 0.3, 10.2, 11.1) == pytest.approx((10.7, 11.0))


def test_a_device_clock_that_goes_slower_is_put_right() -> None:
    placement = StepPlacement(10.0)
    assert placement.place(0.5, 0.2, 12.0, 12.5) == pytest.approx((12.0, 12.2))
    assert placement.place(0.1, 0.1, 12.1, 12.5) == pytest.approx((12.3, 12.4)), "and stays right"


def test_a_device_clock_that_goes_faster_is_put_right() -> None:
    placement = StepPlacement(10.0)
    assert placement.place(2.0, 0.2, 10.1, 10.5) == pytest.approx((10.3, 10.5))


@given(steps=st.lists(st.tuples(DURATIONS, DURATIONS, DURATIONS, DURATIONS), max_size=20))
def test_no_step_overlaps_another_or_lasts_less_than_nothing(steps: list[tuple[float, float, float, float]]) -> None:
    placement, last_end, seen_at = StepPlacement(5.0), 5.0, 5.0
    for gap, duration, queued, seen in steps:
        queued_at = seen_at + queued
        seen_at = queued_at + seen
        start, end = placement.place(gap, duration, queued_at, seen_at)
        assert last_end <= start <= end <= seen_at
        assert end - start <= duration + 1e-9
        last_end = end
