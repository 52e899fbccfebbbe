"""Which steps get a CUDA graph, and when."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from bough.executor.graphs import (
    FINE_TOKENS,
    PAUSE_STEPS,
    TIMED_SIZE,
    USES_BEFORE_CAPTURE,
    Ladder,
    Pauses,
    decode_sizes,
    waits_for_host,
)


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


def alike(size: int, graph: object) -> float:
    """All graphs take as long."""
    return 1.0


def ladder(captured: list[int], pauses: Pauses | None = None, worth: int = 100) -> Ladder[str]:
    """Captures sizes up to `worth`."""

    def capture(size: int) -> str | None:
        captured.append(size)
        return f"graph of {size}" if size <= worth else None

    return Ladder("decode", [1, 2, 4, 8], capture, pauses or Pauses(), alike)


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


def test_the_ladder_ends_where_graphs_do_not_pay(captured: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bough")
    graphs = ladder(captured, worth=1)
    while graphs.capture_next():
        pass
    assert captured == [1, 2, 4]
    assert graphs.find(1) == (1, "graph of 1") and graphs.find(2) is None
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "no decode graphs from size 2 on",
        "all 1 decode graphs are captured, up to size 1",
    ]


class SlowClock:
    """A host that launches anything in 10 ms, and a device whose work takes as many as there are tokens; measurements
    number `disturbed` take ten times as long."""

    def __init__(self, disturbed: tuple[int, ...]) -> None:
        self._now, self._measured, self._disturbed = 0.0, 0, disturbed
        self._queued = 0.0

    def __call__(self) -> float:
        return self._now

    def launch(self, size: float) -> None:
        self._now += 10.0
        self._queued = size * (10.0 if self._measured in self._disturbed else 1.0) - 10.0
        self._measured += 1

    def synchronize(self) -> None:
        self._now += max(0.0, self._queued)
        self._queued = 0.0


@pytest.mark.parametrize(
    ("disturbed", "sizes"),
    [
        ((), [10, 12]),
        ((0,), [10, 12]),  # the better of two measurements counts
        ((0, 1), [12]),  # both are spoilt: that rung alone is missing
        ((2, 3), [10]),
        ((0, 1, 2, 3), []),
    ],
)
def test_one_slow_measurement_does_not_end_the_ladder(
    disturbed: tuple[int, ...], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SlowClock(disturbed)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)

    def capture(size: int) -> int | None:
        return size if waits_for_host(size, lambda: clock.launch(size), clock) else None

    graphs = Ladder("mixed", [10, 12, 40, 50], capture, Pauses(), alike)
    while graphs.capture_next():
        pass
    assert list(graphs._graphs) == sizes


@pytest.mark.parametrize(
    ("size", "worth"), [(64, 1.2), (64, 2.9), (64, 3.1), (FINE_TOKENS, 2.9), (FINE_TOKENS + 64, 2.9), (8192, 1.2)]
)
def test_large_steps_must_wait_for_the_host_more(size: int, worth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowClock(())
    monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
    most = 3.0 if size <= FINE_TOKENS else 1.25
    assert waits_for_host(size, lambda: clock.launch(10 * worth), clock) == (worth <= most)


def test_steps_of_a_rung_that_is_left_out_are_padded_to_the_next(captured: list[int]) -> None:
    def capture(size: int) -> str | None:
        return None if size == 4 else f"graph of {size}"

    graphs = Ladder("mixed", [1, 2, 4, 8], capture, Pauses(), alike)
    while graphs.capture_next():
        pass
    assert graphs.find(3) == graphs.find(4) == (8, "graph of 8")
    assert graphs.find(2) == (2, "graph of 2")


@pytest.mark.parametrize("under_load", [[], [4], [8, 2]])
@pytest.mark.parametrize(
    ("times", "rungs"),
    [
        ({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3}, [1, 2, 4, 8]),
        ({1: 1.0, 2: 1.5, 4: 1.2, 8: 1.3}, [1, 4, 4, 8]),
        ({1: 1.0, 2: 1.2, 4: 1.19, 8: 1.3}, [1, 2, 4, 8]),  # no more than measurements differ
        ({1: 2.0, 2: 1.5, 4: 1.2, 8: 1.3}, [4, 4, 4, 8]),
    ],
)
def test_steps_take_the_next_rung_where_it_is_quicker(
    times: dict[int, float], rungs: list[int], under_load: list[int], captured: list[int]
) -> None:
    graphs = Ladder("decode", [1, 2, 4, 8], lambda size: size, Pauses(), lambda size, graph: times[size])
    for size in under_load:
        for _ in range(PAUSE_STEPS + USES_BEFORE_CAPTURE):
            graphs.find(size)
    while graphs.capture_next():
        pass
    assert [graphs.find(size) for size in (1, 2, 4, 8)] == [(rung, rung) for rung in rungs]


def test_a_rung_must_be_quicker_twice_in_one_moment(captured: list[int]) -> None:
    times = {1: iter([9.0, 9.0, 1.0]), 2: iter([1.0, 1.0, 2.0])}  # 1 was timed while something else was at work
    graphs = Ladder("decode", [1, 2], lambda size: size, Pauses(), lambda size, graph: next(times[size]))
    while graphs.capture_next():
        pass
    assert graphs.find(1) == (1, 1)


def test_large_graphs_are_not_timed(captured: list[int]) -> None:
    sizes = [TIMED_SIZE, TIMED_SIZE + 64, TIMED_SIZE + 128]
    graphs = Ladder("mixed", sizes, lambda size: size, Pauses(), lambda size, graph: {TIMED_SIZE: 1.0}[size])
    while graphs.capture_next():
        pass
    assert [graphs.find(size) for size in sizes] == [(size, size) for size in sizes]


def test_under_load_two_rungs_that_do_not_pay_end_the_ladder_in_any_order(captured: list[int]) -> None:
    graphs = ladder(captured, worth=2)
    for tokens in (8, 4):
        for _ in range(PAUSE_STEPS + USES_BEFORE_CAPTURE):
            assert graphs.find(tokens) is None
    assert captured == [8, 4]
    for _ in range(3 * PAUSE_STEPS):
        assert graphs.find(3) is None
    while graphs.capture_next():
        pass
    assert captured == [8, 4, 1, 2]
