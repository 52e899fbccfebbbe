"""The queue is in order of arrival whatever the order of adding."""

from __future__ import annotations

import pytest

from bough.scheduler.waiting_queue import WaitingQueue
from tests.fakes.boxes import waiting_request


@pytest.mark.parametrize(
    ("added", "removed", "expected"),
    [
        ([], [], []),
        ([0, 1, 2], [], [0, 1, 2]),
        ([3, 4, 1], [], [1, 3, 4]),  # 1 was retracted: it stands before the younger ones
        ([0, 1, 2], [1], [0, 2]),
        ([2, 0, 1], [0, 2], [1]),
    ],
)
def test_order_of_arrival(added: list[int], removed: list[int], expected: list[int]) -> None:
    requests = {arrival: waiting_request(arrival) for arrival in added}
    queue = WaitingQueue()
    for arrival in added:
        queue.add(requests[arrival])
    for arrival in removed:
        queue.remove(requests[arrival])
    assert [r.arrival for r in queue] == expected
    assert len(queue) == len(expected)


def test_removing_a_stranger_is_a_defect() -> None:
    queue = WaitingQueue()
    queue.add(waiting_request(0))
    with pytest.raises(AssertionError):
        queue.remove(waiting_request(0))
