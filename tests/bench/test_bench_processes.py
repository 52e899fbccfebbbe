"""Parts of a load in processes of their own: results in order, progress of all, errors and deaths told."""

from __future__ import annotations

import os

import pytest

from bough.bench.driver import OnProgress, run_parts
from bough.core.errors import EngineDeadError, SettingsError


@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_order_and_progress_adds_up(count: int) -> None:
    made, seen = [], list[int]()

    def work(part: int, on_progress: OnProgress) -> tuple[int, int]:
        on_progress(part)
        on_progress(1)
        return part, os.getpid()

    def make() -> OnProgress:
        made.append(os.getpid())
        return seen.append

    results = run_parts(count, work, make)
    assert [part for part, _ in results] == list(range(count)) and made == [os.getpid()]
    assert sum(seen) == count + sum(range(count))
    assert (os.getpid() in {process for _, process in results}) == (count == 1)


def test_an_error_of_a_part_is_that_of_the_run() -> None:
    def work(part: int, on_progress: OnProgress) -> None:
        if part == 1:
            raise SettingsError("not so")

    with pytest.raises(SettingsError, match="not so"):
        run_parts(2, work, lambda: lambda answered: None)


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(EngineDeadError, match="client process"):
        run_parts(2, lambda part, on_progress: os._exit(3), lambda: lambda answered: None)
