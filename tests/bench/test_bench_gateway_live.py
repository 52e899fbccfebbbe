"""The gateway benchmark with its processes: stand-in workers, a real gateway, users over HTTP."""

from __future__ import annotations

import json

import pytest

from bough.cli.bench import run as bench
from bough.core.errors import SettingsError

SMALL = (
    "--json --workers 2 --users 4 --requests 24 --system-prompts 3 --system-tokens 256 --question-tokens 32 "
    "--output-tokens 8 --prefill-us 5 --decode-ms 0.5 --turns 4"
)


def test_policies_through_a_real_gateway(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(["gateway", *SMALL.split(), "--loads", "multi-turn", "--policies", "kv_events"]) == 0
    (row,) = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert row["requests"] == 24 and row["simulated"] is False
    assert row["hit_rate"] > 0.5  # every turn but the first finds the turns before it, wherever load let it go
    assert row["output_tokens_per_s"] > 0 and row["prediction_error"] is None


@pytest.mark.slow
def test_policies_before_engines(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--model SmolLM2-135M-Instruct --cache-tokens 8192 --loads multi-turn --policies cost"
    assert bench(["gateway", *SMALL.split(), *flags.split(), "--requests", "8", "--question-tokens", "16"]) == 0
    (row,) = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert row["requests"] == 8 and row["hit_rate"] > 0.4 and 1.0 <= row["requests_imbalance"] <= 2.0


def test_engines_have_no_virtual_time() -> None:
    with pytest.raises(SettingsError, match="leave out --simulate"):
        bench(["gateway", "--model", "m", "--simulate"])


@pytest.mark.slow
def test_gateways_of_two_checkouts_take_turns(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--overhead --json --seconds 0.2 --connections 4 --stream-len 4 --against ."
    assert bench(["gateway", *flags.split()]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    for row, unit in zip(rows, ("request", "token", "token"), strict=True):
        figures = row[f"cpu_us_per_{unit}"]
        assert list(figures) == ["only copying", ".", "this checkout"] and min(figures.values()) > 0


@pytest.mark.slow
def test_the_overhead_of_a_real_gateway(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--overhead --json --seconds 0.3 --connections 4 --stream-len 8 --step-ms 1"
    assert bench(["gateway", *flags.split()]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["run"] for row in rows] == ["one request at a time", "4 requests at once", "4 streams at once"]
    for row in rows:
        assert row["direct"]["requests_per_s"] > 0 and row["gateway"]["requests_per_s"] > 0
        assert row["gateway_cpu_us_per_request"] > 0
