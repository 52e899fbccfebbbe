"""How many threads compute: the policy as a table, the rehearsal against an executor that keeps its own time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.core.plan import BatchPlan, Limits, StepResult, TokenMasks
from bough.executor import machine
from bough.executor.machine import compute_cores, physical_cores
from bough.executor.threads import choose_threads, measure_threads, thread_candidates
from tests.fakes.executor import FakeExecutor


@pytest.mark.parametrize(
    ("cores", "candidates"),
    [(1, (1,)), (2, (2,)), (4, (4,)), (6, (6, 5, 4, 3)), (8, (8, 7, 6, 4)), (16, (16, 15, 12, 8))],
)
def test_few_cores_all_compute_and_of_many_some_are_tried(cores: int, candidates: tuple[int, ...]) -> None:
    assert thread_candidates(cores) == candidates


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({8: 1.0, 7: 1.2, 4: 1.5}, 8),
        ({8: 1.0, 7: 1.04, 4: 1.5}, 7),
        ({8: 2.0, 7: 1.9, 4: 1.0}, 4),
        ({2: 3.0}, 2),
    ],
)
def test_the_fewest_that_are_as_fast(seconds: dict[int, float], chosen: int) -> None:
    assert choose_threads(seconds) == chosen


class TimedExecutor:
    """Takes as long for a step as it is told for its number of threads."""

    def __init__(self, step_s: dict[int, float], pages: int = 128) -> None:
        self._inner = FakeExecutor(pages=pages, context_length=128)
        self._step_s = step_s
        self.threads = 0
        self.now = 0.0
        self.steps = 0

    def limits(self) -> Limits:
        return self._inner.limits()

    def run(self, plan: BatchPlan, masks: Callable[[], TokenMasks]) -> StepResult:
        self.now += self._step_s[self.threads]
        self.steps += 1
        return self._inner.launch(plan).wait()

    def set_threads(self, threads: int) -> None:
        self.threads = threads


def test_the_rehearsal_finds_and_sets_the_best() -> None:
    executor = TimedExecutor({8: 0.9, 7: 0.7, 6: 0.5, 4: 0.8})
    assert measure_threads(executor, executor.set_threads, 8, clock=lambda: executor.now) == 6
    assert executor.threads == 6


def test_nothing_is_measured_where_no_prompt_fits() -> None:
    executor = TimedExecutor({}, pages=8)
    assert measure_threads(executor, executor.set_threads, 8) == 8
    assert executor.threads == 8 and executor.steps == 0


def test_nothing_is_measured_on_few_cores() -> None:
    executor = TimedExecutor({})
    assert measure_threads(executor, executor.set_threads, 2) == 2
    assert executor.threads == 2 and executor.steps == 0


def test_two_hardware_threads_are_one_core(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores([0, 1, 2, 3], tmp_path) == 2
    assert physical_cores([1, 3], tmp_path) == 1
    assert physical_cores([8, 9], tmp_path) == 2  # unknown: each counts


def test_the_containers_limit_holds_for_cores_too(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000")
    assert compute_cores(tmp_path, tmp_path) == 1


def test_no_more_threads_than_can_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: set(range(600)))
    assert machine.usable_cores(tmp_path, tmp_path / "none") == 600
    assert compute_cores(tmp_path, tmp_path) == machine.MAX_THREADS
