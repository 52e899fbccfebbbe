"""How many threads compute, by the cores that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.executor import machine
from bough.executor.machine import compute_cores, physical_cores


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 4), (6, 5), (16, 15)])
def test_few_cores_all_compute_and_of_many_one_is_left(
    cores: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: set(range(cores)))
    assert compute_cores(tmp_path, tmp_path) == threads


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
