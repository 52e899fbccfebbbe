"""A serving run as text: the lines that SGLang's tool prints, in its order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LINES = (
    ("backend", "Backend"),
    ("dataset_name", "Data set"),
    ("request_rate", "Traffic request rate"),
    ("max_concurrency", "Max request concurrency"),
    ("completed", "Successful requests"),
    ("failed", "Failed requests"),
    ("first_error", "First error"),
    ("duration", "Benchmark duration (s)"),
    ("total_input_tokens", "Total input tokens"),
    ("total_cached_tokens", "Total cached tokens"),
    ("total_output_tokens", "Total generated tokens"),
    ("request_throughput", "Request throughput (req/s)"),
    ("input_throughput", "Input token throughput (tok/s)"),
    ("output_throughput", "Output token throughput (tok/s)"),
    ("max_output_tokens_per_s", "Peak output token throughput (tok/s)"),
    ("total_throughput", "Total token throughput (tok/s)"),
    ("concurrency", "Concurrency"),
    ("max_concurrent_requests", "Peak concurrent requests"),
)
SPREADS = (("e2e_latency", "E2E Latency"), ("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"))
WORDS = ("mean", "median", "p90", "p95", "p99")


def headline(result: Mapping[str, Any]) -> str:
    return f"{result['backend']}, {result['dataset_name']}: {result['completed']} requests"


def table(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every line as (name, value)."""
    rows = [(label, _shown(result[name])) for name, label in LINES if result[name] is not None]
    for name, label in SPREADS:
        rows += [(f"{word.capitalize()} {label} (ms)", _shown(result[f"{word}_{name}_ms"])) for word in WORDS]
    return [*rows, ("Max ITL (ms)", _shown(result["max_itl_ms"]))]


def text_report(result: Mapping[str, Any]) -> str:
    rows = table(result)
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name + ':':<{width}} {value:>14}" for name, value in rows]
    return "\n".join(["Serving benchmark result".center(width + 15, "="), *lines, "=" * (width + 15)])


def _shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
