"""What a run of `bough bench gateway` comes to: hit rate, throughput, latencies, and how evenly workers were used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was answered."""

    worker: str
    prompt_tokens: int
    cached_tokens: int
    expected_cached: float | None  # the share that the policy expected; None where it cannot be seen from outside
    output_tokens: int
    sent_s: float
    first_s: float  # from sending to the first token
    total_s: float


def summarise(served: Sequence[Served], workers: int) -> dict[str, Any]:
    """The figures of a run. `imbalance` is the busiest worker's prefill over the mean: 1 is even."""
    prompts = sum(each.prompt_tokens for each in served)
    cached = sum(each.cached_tokens for each in served)
    duration_s = max(each.sent_s + each.total_s for each in served) - min(each.sent_s for each in served)
    answered = Counter(each.worker for each in served)
    computed: Counter[str] = Counter()
    for each in served:
        computed[each.worker] += each.prompt_tokens - each.cached_tokens
    return {
        "requests": len(served),
        "duration_s": duration_s,
        "hit_rate": cached / prompts,
        "requests_per_s": len(served) / duration_s,
        "output_tokens_per_s": sum(each.output_tokens for each in served) / duration_s,
        "ttft_ms": _spread([each.first_s for each in served]),
        "latency_ms": _spread([each.total_s for each in served]),
        "requests_imbalance": max(answered.values()) * workers / len(served),
        "prefill_imbalance": max(computed.values()) * workers / max(1, sum(computed.values())),
        "prediction_error": _prediction_error(served),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.quantile(np.array(seconds), [0.5, 0.99])
    return {"p50": 1e3 * float(p50), "p99": 1e3 * float(p99)}


def _prediction_error(served: Sequence[Served]) -> float | None:
    """Mean distance between the share of a prompt that was expected to be cached and the share that was."""
    errors = [
        abs(each.expected_cached - each.cached_tokens / each.prompt_tokens)
        for each in served
        if each.expected_cached is not None
    ]
    return sum(errors) / len(errors) if errors else None


def as_text(result: dict[str, Any]) -> str:
    way = "in virtual time" if result["simulated"] else "through a gateway, on this machine's clock"
    lines = [f"{result['load']}, {result['policy']} ({result['requests']:,} requests, {way}):"]
    for name, value in result.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{part} {figure:,.1f}" for part, figure in value.items())
            lines.append(f"  {name.replace('_', ' '):<22} {shown}")
        elif isinstance(value, float):
            lines.append(f"  {name.replace('_', ' '):<22} {value:,.3f}")
    return "\n".join(lines)
