"""What passing through the gateway costs: the same requests straight to a worker and through the gateway before it.

Three loads: one request at a time (the latency that the gateway adds), many at once (what it can take), and streams at
the pace of a device, one token per event (proxied tokens). Beside the rates stands the gateway's CPU time, which holds
on a busy machine too; what it is spent on shows py-spy (`py-spy record --pid`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from tests.bench.edge_client import Request, Tally, send_for
from tests.bench.gateway_processes import gateway_process, worker_processes
from tests.bench.gateway_simulation import Costs
from tests.bench.gateway_worker import MODEL

PROMPT = "The quick brown fox jumps over the lazy dog, and then it rests for a while in the shade of an old tree. " * 2
POLICY = "cost"
INSTANT = Costs(prefill_us=0.0, decode_ms=0.0, crowd_ms=0.0, cache_tokens=4096)


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    """How long and with how many clients."""

    seconds: float = 5.0
    connections: int = 32
    stream_len: int = 128
    step_ms: float = 5.0
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """One of the loads."""

    name: str
    connections: int
    tokens: int
    stream: bool
    costs: Costs


def measure_overhead(options: OverheadOptions) -> list[dict[str, Any]]:
    """One result per load."""
    paced = Costs(prefill_us=0.0, decode_ms=options.step_ms, crowd_ms=0.0, cache_tokens=4096)
    shapes = [
        Shape("one request at a time", 1, 1, False, INSTANT),
        Shape(f"{options.connections} requests at once", options.connections, 1, False, INSTANT),
        Shape(f"{options.connections} streams at once", options.connections, options.stream_len, True, paced),
    ]
    return [_compare(shape, options) for shape in shapes]


def _compare(shape: Shape, options: OverheadOptions) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": shape.tokens, "stream": shape.stream}
    request = Request("/v1/completions", body, shape.stream)

    def load(url: str) -> Tally:
        send_for(url, request, shape.connections, min(1.0, options.seconds))  # warm-up
        return send_for(url, request, shape.connections, options.seconds)

    with worker_processes(1, shape.costs, event_tokens=1) as workers:
        direct = _figures(load(workers[0]), shape, options.seconds)
        with gateway_process(workers, POLICY, options.processes) as gateway:
            before_s = _cpu_s(gateway.process_id)
            tally = load(gateway.url)
            spent_s = _cpu_s(gateway.process_id) - before_s
    through = _figures(tally, shape, options.seconds)
    share = options.seconds / (options.seconds + min(1.0, options.seconds))  # the warm-up's part is not counted
    return {
        "run": shape.name,
        "direct": direct,
        "gateway": through,
        "added_ms": {part: through["latency_ms"][part] - direct["latency_ms"][part] for part in ("p50", "p99")},
        "gateway_cpu_us_per_request": 1e6 * spent_s * share / max(1, tally.answers),
        "gateway_cpu_us_per_token": 1e6 * spent_s * share / max(1, tally.answers * shape.tokens),
    }


def _figures(tally: Tally, shape: Shape, seconds: float) -> dict[str, Any]:
    p50, p99 = np.quantile(np.array(tally.latencies_s), [0.5, 0.99])
    return {
        "requests_per_s": tally.answers / seconds,
        "tokens_per_s": tally.answers * shape.tokens / seconds,
        "latency_ms": {"p50": 1e3 * float(p50), "p99": 1e3 * float(p99)},
    }


def _cpu_s(process_id: int) -> float:
    """CPU time of a process and all below it."""
    top = psutil.Process(process_id)
    times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def as_text(result: dict[str, Any]) -> str:
    lines = [f"{result['run']}:"]
    for way in ("direct", "gateway"):
        figures = result[way]
        latency = figures["latency_ms"]
        lines.append(
            f"  {way:<8} {figures['requests_per_s']:>9,.0f} requests/s {figures['tokens_per_s']:>10,.0f} tokens/s"
            f"   p50 {latency['p50']:.3f} ms, p99 {latency['p99']:.3f} ms"
        )
    added = result["added_ms"]
    lines.append(f"  added    p50 {added['p50']:.3f} ms, p99 {added['p99']:.3f} ms")
    per_request, per_token = result["gateway_cpu_us_per_request"], result["gateway_cpu_us_per_token"]
    lines.append(f"  CPU time of the gateway: {per_request:,.0f} µs per request, {per_token:,.1f} µs per token")
    return "\n".join(lines)
