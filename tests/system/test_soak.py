"""What the soak script calls a failure, on samples that are made up. The run itself takes an hour."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.system.chaos.load import OUTCOMES
from tests.system.soak import PAGES, SoakLoad, judge, new_case, write

FLUSHED = {"num_used_tokens": 0, "cached_prefix_tokens": 0}


def samples(**figures: Callable[[int], float]) -> list[dict[str, Any]]:
    """Sixty of them; a pause every tenth. `figures` give a value for each."""
    flat: dict[str, Any] = {"scheduler RSS MiB": 800.0, "scheduler descriptors": 30, "scheduler threads": 9}
    made = []
    for number in range(60):
        quiet = number % 10 == 9
        entry = {"t": number * 10.0, "quiet": int(quiet), **flat, **dict.fromkeys(PAGES, 0), "sent": number}
        entry |= {"num_used_tokens": 0 if quiet else 300, **dict.fromkeys(OUTCOMES, 0)}
        made.append(entry | {name: value(number) for name, value in figures.items()})
    return made


def load(*notes: str) -> SoakLoad:
    made = SoakLoad("", lambda begin: False)
    made.notes += notes
    return made


@pytest.mark.parametrize(
    ("figures", "failure"),
    [
        ({}, None),
        ({"scheduler RSS MiB": lambda n: 600.0 + 20 * min(n, 10)}, None),  # a cache that fills up at first
        ({"scheduler RSS MiB": lambda n: 800.0 + n}, "scheduler RSS MiB"),
        ({"gateway 1 descriptors": lambda n: 20 + n // 5}, "gateway 1 descriptors"),
        ({"scheduler threads": lambda n: 9 + n}, "scheduler threads"),
        ({"num_used_tokens": lambda n: 7}, "7 tokens in use in the pause"),
    ],
)
def test_growth_and_held_pages_are_failures(figures: dict[str, Any], failure: str | None) -> None:
    failures = judge(load(), samples(**figures), FLUSHED)["failures"]
    assert bool(failures) == (failure is not None) and all(str(failure) in each for each in failures)


def test_what_went_wrong_is_a_failure() -> None:
    assert judge(load("lost: x"), samples(), FLUSHED)["failures"] == ["lost: x"]
    assert "after a flush" in judge(load(), samples(), {**FLUSHED, "cached_prefix_tokens": 5})["failures"][0]


def test_a_run_leaves_a_table_and_a_plot(tmp_path: Path) -> None:
    made = samples()
    write(tmp_path, judge(load(), made, FLUSHED), made)
    assert len((tmp_path / "soak.csv").read_text().splitlines()) == 61
    assert json.loads((tmp_path / "soak.json").read_text())["early_and_late"]["scheduler RSS MiB"] == [800.0, 800.0]
    assert "<svg" in (tmp_path / "soak.svg").read_text()


def test_new_requests_differ() -> None:
    draw = random.Random(0)
    made = [new_case(number, draw) for number in range(40)]
    assert len({json.dumps(case.body) for case in made}) == 40 and len({case.kind for case in made}) == 5
