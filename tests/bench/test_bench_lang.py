"""The benchmark of the frontend language: its figures are there and add up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bough.cli.main import main

SMALL = [
    "--questions",
    "6",
    "--shots",
    "4",
    "--fan-out",
    "2",
    "--depth",
    "2",
    "--output-len",
    "2",
    "--primitives",
    "60",
]
ENGINE = ["--dtype", "float32", "--quantization", "none", "--max-total-tokens", "8000"]


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_programs_share_what_single_calls_compute_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lang", *SMALL, *ENGINE, "--json"]) == 0
    costs, few_shot, tree = lines_of(capsys)
    assert costs.keys() >= {"text", "role", "gen", "gen_and_read", "select", "fork"}
    assert few_shot["requests"] == 6 and few_shot["output_tokens"] == 12 and few_shot["cached_share"] > 0.8
    assert tree["requests"] == 2 + 4 + 4 * 2 and tree["cached_share"] > 0.5
    assert few_shot["speed_up"] > 0 and tree["speed_up"] > 0


def test_the_interpreter_alone_starts_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lang", "--interpreter-only", "--primitives", "30"]) == 0
    assert capsys.readouterr().out.startswith("interpreter, CPU µs per primitive:\n  text")
    assert main(["bench", "lang", "--fan-out", "0"]) == 2
