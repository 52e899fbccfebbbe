"""The gateway benchmark with its processes: stand-in workers, a real gateway, users over HTTP."""

from __future__ import annotations

import json

import pytest

from bough.cli.bench import run as bench

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
def test_the_overhead_of_a_real_gateway(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--overhead --json --seconds 0.3 --connections 4 --stream-len 8 --step-ms 1"
    assert bench(["gateway", *flags.split()]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["run"] for row in rows] == ["one request at a time", "4 requests at once", "4 streams at once"]
    for row in rows:
        assert row["direct"]["requests_per_s"] > 0 and row["gateway"]["requests_per_s"] > 0
        assert row["gateway_cpu_us_per_request"] > 0
