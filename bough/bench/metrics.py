"""From records to figures and text, with the names and definitions of SGLang's `bench_serving`.

TTFT: time to first token. TPOT: mean time per further token of a request. ITL: gap before each further token. E2E: the
whole request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bough.bench.backends import Record

FloatArray = npt.NDArray[np.float64]
PERCENTILES = (90, 95, 99)
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


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """All figures of a run; failed requests are only counted."""
    good = [record for record in records if record.ok]
    duration = max((r.began_s + r.total_s for r in good), default=0.0) - min((r.began_s for r in good), default=0.0)
    given, cached, made = (
        sum(getattr(record, name) for record in good) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )

    def rate(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    streamed = [record for record in good if record.gaps_s]
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "first_error": next((record.error for record in records if not record.ok), None),
        "total_input_tokens": given,
        "total_cached_tokens": cached,
        "total_output_tokens": made,
        "request_throughput": rate(len(good)),
        "input_throughput": rate(given),
        "output_throughput": rate(made),
        "total_throughput": rate(given + made),
        "max_output_tokens_per_s": max(tokens_by_second(good), default=0.0),
        "concurrency": rate(sum(record.total_s for record in good)),
        "max_concurrent_requests": peak_concurrency(good),
        **_spread("e2e_latency", [record.total_s for record in good]),
        **_spread("ttft", [record.first_s for record in good]),
        **_spread("tpot", [(r.total_s - r.first_s) / (r.output_tokens - 1) for r in streamed if r.output_tokens > 1]),
        **_spread("itl", gaps := [gap for record in good for gap in record.gaps_s]),
        "max_itl_ms": 1e3 * max(gaps, default=0.0),
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds; zeros without values."""
    values = 1e3 * np.array(seconds if len(seconds) else [0.0])
    found = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    found |= {f"p{percent}": np.percentile(values, percent) for percent in PERCENTILES}
    return {f"{word}_{name}_ms": float(value) for word, value in found.items()}


def tokens_by_second(records: Sequence[Record]) -> list[float]:
    seconds: list[FloatArray] = [np.zeros(0)]
    weights: list[FloatArray] = [np.zeros(0)]
    for record in records:
        times = record.began_s + record.first_s + np.cumsum([0.0, *record.gaps_s])
        seconds.append(times)
        # A server that puts several tokens into one chunk may not say how many: they count in equal parts.
        weights.append(np.full(len(times), record.output_tokens / len(times)))
    return [float(n) for n in np.bincount(np.concatenate(seconds).astype(np.int64), np.concatenate(weights))]


def peak_concurrency(records: Sequence[Record]) -> int:
    # An end counts before a beginning at the same moment: a closed loop never has more than its users.
    changes = [(r.began_s + r.total_s, -1) for r in records] + [(r.began_s, 1) for r in records]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


# ---- as text, in the order of SGLang's tool


def headline(result: Mapping[str, Any]) -> str:
    return f"{result['backend']}, {result['dataset_name']}: {result['completed']} requests"


def table(result: Mapping[str, Any]) -> list[tuple[str, str]]:
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
