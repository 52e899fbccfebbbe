"""Which steps get a CUDA graph, and when."""

from __future__ import annotations

import itertools

import pytest
import torch

from bough.executor.graphs import PAUSE_STEPS, USES_BEFORE_CAPTURE, Ladder, Pauses, decode_sizes


@pytest.mark.parametrize("largest", [1, 7, 16, 256, 500, 512, 1000])
def test_the_ladder_ends_at_the_largest_and_wastes_little(largest: int) -> None:
    sizes = decode_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for batch in range(1, largest + 1):
        rung = next(size for size in sizes if size >= batch)
        assert rung - batch < max(2, 8, batch // 8)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return []


def ladder(captured: list[int], pauses: Pauses | None = None, worth: int = 100) -> Ladder[str]:
    """Captures sizes up to `worth`."""

    def capture(size: int) -> str | None:
        captured.append(size)
        return f"graph of {size}" if size <= worth else None

    return Ladder("decode", [1, 2, 4, 8], capture, pauses or Pauses())


def test_quiet_moments_complete_the_ladder_smallest_first(captured: list[int]) -> None:
    graphs = ladder(captured)
    while graphs.capture_next():
        pass
    assert captured == [1, 2, 4, 8]
    assert graphs.find(3) == (4, "graph of 4")
    assert graphs.find(9) is None


def test_under_load_a_size_must_come_back_before_it_is_captured(captured: list[int]) -> None:
    graphs = ladder(captured)
    for _ in range(USES_BEFORE_CAPTURE):
        assert graphs.find(3) is None
    assert graphs.find(3) == (4, "graph of 4")
    assert captured == [4]


def test_captures_under_load_are_far_apart_over_all_ladders(captured: list[int]) -> None:
    pauses = Pauses()
    one, other = ladder(captured, pauses), ladder(captured, pauses)
    steps = []
    for step in range(3 * PAUSE_STEPS):
        before = len(captured)
        (one if step % 2 else other).find(1 + step % 8)
        if len(captured) > before:
            steps.append(step)
    assert len(steps) > 1 and all(b - a >= PAUSE_STEPS for a, b in itertools.pairwise(steps))


def test_the_ladder_ends_where_graphs_do_not_pay(captured: list[int]) -> None:
    graphs = ladder(captured, worth=2)
    while graphs.capture_next():
        pass
    assert captured == [1, 2, 4]
    assert graphs.find(2) == (2, "graph of 2") and graphs.find(3) is None
