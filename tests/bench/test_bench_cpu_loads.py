"""The loads of `bough bench cpu`: what is counted of them, and the plans that stand in for the scheduler."""

from __future__ import annotations

import pytest

from bough.core.errors import SettingsError
from tests.bench.cpu_cases import Case, Start, Timing, cases
from tests.bench.cpu_executor import run_case
from tests.bench.cpu_plans import CasePlans
from tests.fakes.executor import FakeExecutor, oracle


def test_loads_are_seeded_and_shaped() -> None:
    loads = {case.name: case for case in cases()}
    assert list(loads.values()) == cases() and cases(seed=1) != cases()
    assert len(loads["prompt-2048"].prompts[0]) == 2048
    chats = loads["chats-32"]
    assert (len(chats.prefix), len(chats.prompts), chats.output_tokens) == (1000, 32, 32)
    assert all(len(case.prompts[0]) <= 103 for case in cases(scale=0.05))


@pytest.mark.parametrize(("counted", "rate"), [("prompt", 12 / 2), ("decode", (7 - 1) / 3), ("total", 3 * 7 / 5)])
def test_each_load_counts_its_own_tokens(counted: str, rate: float) -> None:
    case = Case("any", "any", counted, [0] * 8, [[0] * 4] * 3, 7)  # type: ignore[arg-type]
    assert Timing(first_s=2.0, total_s=5.0).rate(case) == rate


def test_tokens_that_came_with_the_first_are_not_decoded_after_it() -> None:
    case = Case("any", "any", "decode", [], [[0]], 7)
    assert Timing(first_s=2.0, total_s=5.0, first_tokens=4).rate(case) == 1.0


def test_a_start_is_the_sum_of_its_parts() -> None:
    assert Start([("imports", 1.5), ("load", 0.5)]).total_s == 2.0


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("chunk_tokens", [4, 7, 64])
def test_plans_compute_every_row_on_its_own_pages(page_size: int, chunk_tokens: int) -> None:
    case = Case("any", "any", "total", list(range(1, 12)), [[21, 22], [31, 32, 33], [41]], 4)
    executor = FakeExecutor(page_size=page_size, chunk_tokens=chunk_tokens)
    plans = CasePlans(case, executor.limits())
    found: dict[int, list[int]] = {row: [] for row in range(3)}
    for plan in [*plans.prompts(), *plans.decodes()]:
        assert plan.given.sum() <= chunk_tokens
        tokens = executor.launch(plan).wait().tokens[:, 0].tolist()
        for row, token in zip(plan.rows[plan.sample].tolist(), tokens, strict=True):
            found[row].append(token)
    assert found == {row: oracle(case.prefix + prompt, 4) for row, prompt in enumerate(case.prompts)}


def test_what_is_shared_is_computed_once() -> None:
    case = Case("any", "any", "total", list(range(1, 12)), [[21, 22], [31, 32]], 3)
    executor = FakeExecutor()
    timing = run_case(executor, case)
    assert executor.computed_tokens == 11 + 2 * 2 + 2 * 2
    assert 0 < timing.first_s < timing.total_s


def test_a_load_that_does_not_fit_is_refused() -> None:
    case = Case("huge", "any", "total", [], [[1] * 60] * 2, 3)
    with pytest.raises(SettingsError, match="'huge' needs 2 rows and 126 pages, the executor has 8 and 64"):
        CasePlans(case, FakeExecutor().limits())
