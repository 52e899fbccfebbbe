"""Orders as tables: a snapshot in, who goes first out."""

from __future__ import annotations

import random

import pytest

from bough.core.settings import SCHEDULE_POLICIES
from bough.scheduler.policy import (
    LPM_QUEUE_LIMIT,
    Running,
    Waiting,
    affordable,
    order,
    preemption_order,
    retraction_order,
)


@pytest.mark.parametrize(
    ("policy", "waiting", "expected"),
    [
        ("fcfs", [Waiting(2, urgency=9), Waiting(0), Waiting(1)], [1, 2, 0]),
        ("priority", [Waiting(0), Waiting(2, urgency=5), Waiting(1, urgency=5)], [2, 1, 0]),
        ("priority", [Waiting(0, urgency=-1), Waiting(1)], [1, 0]),
        ("lof", [Waiting(0, max_new=3), Waiting(1, max_new=9), Waiting(2, max_new=9)], [1, 2, 0]),
        ("lpm", [Waiting(0, prefix=1), Waiting(1, prefix=4), Waiting(2, prefix=4)], [1, 2, 0]),
        # Branch 7 has two requests, so it goes first and together; then branch 5; what nothing is cached of goes first.
        ("dfs-weight", [Waiting(0, path=(5,)), Waiting(1, path=(7, 8)), Waiting(2, path=(7, 9))], [1, 2, 0]),
        ("dfs-weight", [Waiting(0, path=(7, 8)), Waiting(1, path=(7,)), Waiting(2)], [2, 1, 0]),
    ],
)
def test_order(policy: str, waiting: list[Waiting], expected: list[int]) -> None:
    assert order(policy, waiting, random.Random(0)) == expected


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_every_policy_keeps_everybody(policy: str) -> None:
    waiting = [Waiting(arrival, prefix=arrival % 3, path=(arrival % 2,)) for arrival in range(20)]
    assert sorted(order(policy, waiting, random.Random(0))) == list(range(20))
    assert order(policy, [], random.Random(0)) == []


def test_random_is_a_function_of_its_seed() -> None:
    waiting = [Waiting(arrival) for arrival in range(20)]
    first, again, other = (order("random", waiting, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("policy", "queued", "expected"),
    [
        ("lpm", LPM_QUEUE_LIMIT, "lpm"),
        ("lpm", LPM_QUEUE_LIMIT + 1, "fcfs"),
        ("dfs-weight", LPM_QUEUE_LIMIT + 1, "dfs-weight"),
        ("priority", LPM_QUEUE_LIMIT + 1, "priority"),
    ],
)
def test_a_long_queue_is_not_matched(policy: str, queued: int, expected: str) -> None:
    assert affordable(policy, queued) == expected


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        # row, generated, prompt_len, arrival, urgency
        ([Running(0, 5, 10, 0), Running(1, 2, 10, 1)], [1, 0]),  # least output
        ([Running(0, 5, 10, 0), Running(1, 5, 30, 1)], [1, 0]),  # longest prompt
        ([Running(0, 5, 10, 0), Running(1, 5, 10, 1)], [1, 0]),  # youngest
        ([Running(0, 5, 10, 3), Running(1, 5, 10, 1), Running(2, 5, 10, 2)], [0, 2, 1]),
        ([Running(0, 1, 99, 1, urgency=2), Running(1, 9, 1, 0, urgency=1)], [1, 0]),  # urgency before everything
        ([], []),
    ],
)
def test_retraction_order(running: list[Running], expected: list[int]) -> None:
    assert retraction_order(running) == expected


@pytest.mark.parametrize(
    ("urgency", "threshold", "expected"), [(0, 0, []), (5, 5, []), (6, 5, [0]), (21, 10, [0, 1]), (100, 10, [0, 1, 2])]
)
def test_only_clearly_less_urgent_rows_are_preempted(urgency: int, threshold: int, expected: list[int]) -> None:
    running = [Running(0, 3, 5, 0, urgency=0), Running(1, 3, 5, 1, urgency=10), Running(2, 3, 5, 2, urgency=20)]
    assert preemption_order(running, urgency, threshold) == expected
