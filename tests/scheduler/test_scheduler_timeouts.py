"""Whose time is up: clock readings in, endings out."""

from __future__ import annotations

import pytest

from bough.scheduler.rows import RowTable
from bough.scheduler.waiting_queue import CHECK_INTERVAL_S, Timeouts, WaitingQueue
from tests.fakes.boxes import waiting_request


def due(timeouts: Timeouts, now: float, *, waiting: dict[int, float], running: dict[int, tuple[float, float]]) -> str:
    """`waiting`: arrival -> since when; `running`: arrival -> (since when, seconds run before)."""
    queue, table = WaitingQueue(), RowTable(4, 8, 1)
    for arrival, since in waiting.items():
        queue.add(waiting_request(arrival, since=since))
    for arrival, (since, ran_s) in running.items():
        table.assign(waiting_request(arrival, since=since, ran_s=ran_s))
    found = timeouts.due(now, queue, table)
    assert all(reason.status_code == 503 and reason.err_type == "TimeoutError" for _, reason in found)
    return " ".join(f"{r.arrival}:{'waited' if 'waited' in reason.message else 'ran'}" for r, reason in found)


@pytest.mark.parametrize(
    ("waiting_s", "running_s", "now", "expected"),
    [
        (None, None, 1e9, ""),
        (5.0, None, 5.0, ""),
        (5.0, None, 5.1, "0:waited"),
        (5.0, None, 9.0, "0:waited 1:waited"),
        (None, 5.0, 4.9, "3:ran"),  # 2 s before its retraction and 3.9 s since
        (None, 5.0, 5.1, "2:ran 3:ran"),
        (5.0, 5.0, 5.1, "0:waited 2:ran 3:ran"),
        (0.0, None, 3.0, "0:waited"),
    ],
)
def test_due(waiting_s: float | None, running_s: float | None, now: float, expected: str) -> None:
    timeouts = Timeouts(waiting_s, running_s)
    assert due(timeouts, now, waiting={0: 0.0, 1: 3.0}, running={2: (0.0, 0.0), 3: (1.0, 2.0)}) == expected


def test_nobody_is_looked_at_twice_within_the_interval() -> None:
    timeouts = Timeouts(1.0, None)
    assert due(timeouts, 1.0, waiting={0: 0.0}, running={}) == ""
    assert due(timeouts, 1.0 + CHECK_INTERVAL_S / 2, waiting={0: 0.0}, running={}) == ""
    assert due(timeouts, 1.0 + CHECK_INTERVAL_S * 2, waiting={0: 0.0}, running={}) == "0:waited"


def test_a_request_keeps_its_times_over_a_retraction() -> None:
    request = waiting_request(since=1.0)
    request.begin_running(3.0)
    request.begin_waiting_again(10.0)
    request.begin_running(14.0)
    assert (request.queue_time_s, request.ran_s, request.since, request.retractions) == (2.0, 7.0, 14.0, 1)
