"""What `bough bench cpu` makes of its measurements: ratios round by round, tables, bars."""

from __future__ import annotations

import json

import pytest

from tests.bench.cpu_cases import Start
from tests.bench.cpu_report import CaseResult, Comparison, SideResult, StartResult, json_report, spread, text_report


@pytest.fixture
def found() -> Comparison:
    rates = [SideResult("engine", [10.0, 30.0, 8.0]), SideResult("llama.cpp", [5.0, 10.0, 8.0])]
    starts = [
        StartResult(
            side, [Start([("imports", 1.0), ("load", load)], load + 2) for load in (5.0, 1.0, 2.0)], 250_000_000
        )
        for side in ("engine", "llama.cpp")
    ]
    return Comparison({"machine": "two <cores>"}, [CaseResult("decode", "one stream", rates)], starts)


def test_a_ratio_compares_what_ran_in_the_same_round(found: Comparison) -> None:
    assert found.cases[0].ratios("engine", "llama.cpp") == [2.0, 3.0, 1.0]


def test_the_middle_start_is_shown_whole(found: Comparison) -> None:
    assert found.starts[0].median.parts == [("imports", 1.0), ("load", 2.0)]


def test_spread_names_the_extremes_only_where_there_are_some() -> None:
    assert spread([2.0]) == "2.00"
    assert spread([1.0, 4.0, 2.0]) == "2.00 (1.00–4.00)"


def test_the_text_has_rates_ratios_starts_and_memory(found: Comparison) -> None:
    text = text_report(found, "llama.cpp")
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert "tok/s, median engine llama.cpp engine / llama.cpp" in lines
    assert f"one stream 10.0 8.0 2.00 (1.00–3.00) {'█' * 16}" in lines
    assert "engine 3.00 imports 1.00, load 2.00 4.00 250" in lines
    assert "machine: two <cores>" in lines
    assert "engine / llama.cpp" not in text_report(found, None)


def test_the_json_has_rates_and_ratios(found: Comparison) -> None:
    content = json.loads(json_report(found, "llama.cpp"))
    assert content["ratios"] == {"decode": {"engine": {"median": 2.0, "rounds": [2.0, 3.0, 1.0]}}}
    assert content["cases"][0]["sides"][1] == {"side": "llama.cpp", "rates": [5.0, 10.0, 8.0]}
    assert "ratios" not in json.loads(json_report(found, None))
