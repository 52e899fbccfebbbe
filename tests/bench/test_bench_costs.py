"""The cost model stays near what was measured."""

from __future__ import annotations

import pytest

from bough.bench.offline import workload
from tests.bench.costs import MEASURED, exchange_rows, loads_of, modelled


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4"])
def test_steps_compute_the_whole_load(name: str) -> None:
    jobs, loads = workload(name), loads_of(name, 8192)
    prompts = sum(len(job.prompt) for job in jobs)
    assert sum(load.prompt for load in loads) == prompts - (504 * 1024 if name == "W2" else 0)
    assert sum(load.decodes for load in loads) == sum(job.output_tokens - 1 for job in jobs)
    assert all(load.prompt <= 8192 and load.decodes <= 512 for load in loads)


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_the_model_is_within_a_quarter_of_what_was_measured(shape: str) -> None:
    for name, measured in MEASURED[shape, 2.0].items():
        assert modelled(shape, 2.0, name) == pytest.approx(measured, rel=0.25), name


def test_exchanges_take_longer_over_more_ranks_and_bytes() -> None:
    rows = list(exchange_rows())[2:]
    assert len(rows) == 6
    times = [[float(cell.removesuffix(" µs").replace(",", "")) for cell in row[1:]] for row in rows]
    assert all(row == sorted(row) for row in times)
