"""The live queue under its policy: what is looked up in the tree, and which way priorities point."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.settings import SchedulerSettings
from bough.memory.tree.tree import RadixTree
from bough.scheduler.policy import LPM_QUEUE_LIMIT, Ranking
from bough.scheduler.waiting_queue import WaitingQueue
from tests.fakes.boxes import waiting_request


class CountingTree(RadixTree):
    matched = 0

    def match_length(self, key: np.ndarray, namespace: str = "") -> int:
        self.matched += 1
        return super().match_length(key, namespace)


def queue_of(*requests: object) -> WaitingQueue:
    queue = WaitingQueue()
    for request in requests:
        queue.add(request)  # type: ignore[arg-type]
    return queue


@pytest.mark.parametrize(("queued", "matched"), [(1, 0), (2, 2), (LPM_QUEUE_LIMIT, 128), (LPM_QUEUE_LIMIT + 1, 0)])
def test_lpm_matches_prompts_only_while_that_pays(queued: int, matched: int) -> None:
    tree = CountingTree()
    queue = queue_of(*(waiting_request(i) for i in range(queued)))
    ordered = Ranking(SchedulerSettings(schedule_policy="lpm"), tree, 0).ordered(queue, 0)
    assert tree.matched == matched and len(ordered) == queued


def test_a_prompt_that_waits_is_matched_anew_only_when_running_requests_have_moved() -> None:
    tree, queue = CountingTree(), queue_of(waiting_request(0), waiting_request(1))
    ranking, matched = Ranking(SchedulerSettings(schedule_policy="lpm"), tree, 0), []
    for moves in (5, 5, 5, 6):
        ranking.ordered(queue, moves)
        queue.add(waiting_request(len(queue)))
        matched.append(tree.matched)
    assert matched == [2, 3, 4, 4 + 5]


def test_lpm_and_dfs_put_the_cached_prompt_where_it_belongs() -> None:
    tree = RadixTree()
    tree.insert(np.array([7, 8, 9], dtype=np.int32), np.array([1, 2, 3], dtype=np.int32))
    requests = [waiting_request(0, [1, 2]), waiting_request(1, [7, 8, 9, 1]), waiting_request(2, [7, 8, 4])]
    for policy, expected in (("lpm", [1, 2, 0]), ("dfs-weight", [0, 2, 1]), ("fcfs", [0, 1, 2])):
        ranking = Ranking(SchedulerSettings(schedule_policy=policy), tree, 0)
        assert [r.arrival for r in ranking.ordered(queue_of(*requests), 0)] == expected, policy


@pytest.mark.parametrize(
    ("settings", "urgency"),
    [
        (SchedulerSettings(), 0),
        (SchedulerSettings(schedule_policy="priority"), 5),
        (SchedulerSettings(enable_priority_scheduling=True), 5),
        (SchedulerSettings(schedule_policy="priority", schedule_low_priority_values_first=True), -5),
    ],
)
def test_urgency_is_priority_where_priority_counts(settings: SchedulerSettings, urgency: int) -> None:
    assert Ranking(settings, RadixTree(), 0).urgency(waiting_request(priority=5)) == urgency
