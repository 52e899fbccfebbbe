"""The gateway's metrics for Prometheus. Counts are kept here; gauges of workers are read when the page is made."""

from __future__ import annotations

import bisect
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bough.gateway.call import Call
from bough.gateway.dispatch import Dispatch
from bough.gateway.registry import Registry
from bough.gateway.responses import JSON_PATHS, AttemptFailedError
from bough.gateway.worker import Worker
from bough.observability.metrics_page import families_page

CONTENT_TYPE = CONTENT_TYPE_LATEST
STATES = ("_breaker_state", "_worker_healthy")  # figures that are not counts
LATENCIES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics(Collector):
    """As a collector it gives the gauges of the workers and of the requests."""

    def __init__(self, workers: Registry, dispatch: Dispatch) -> None:
        self._workers = workers
        self._dispatch = dispatch
        self._registry = registry = CollectorRegistry(auto_describe=False)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"bough_gateway_{name}", about, labels, registry=registry)

        self._queued = counter("queued_seconds", "Time that requests waited for a worker")
        self._failures = counter("attempt_failures", "Attempts that failed, by status", "worker", "status")
        self.retries = counter("retries", "Attempts made after a failed one")
        self.moves = counter("moves", "Requests moved away from a lost worker")
        self.hedges = counter("hedges", "Second workers asked beside a slow one")
        self.failovers = counter("stream_failovers", "Streams resumed on another worker")
        self.poisons = counter("poison_requests", "Requests that two workers failed at in the same way")
        self.rate_limited = counter("rate_limited", "Requests over a rate limit")
        # What every request counts is counted here, at a tenth of what a `Counter` and its lock cost.
        self._requests: dict[tuple[str, str, int], int] = defaultdict(int)  # by model, path and status
        self._latency: dict[str, Latencies] = defaultdict(Latencies)  # by model
        self._first_byte: dict[str, Latencies] = defaultdict(Latencies)
        self._attempts: dict[str, int] = defaultdict(int)  # by worker
        self._prompt_tokens = self._cached_tokens = 0
        self._expected_tokens = 0.0
        registry.register(self)

    def attempted(self, worker: Worker) -> None:
        self._attempts[worker.url] += 1

    def attempt_failed(self, worker: Worker, failure: AttemptFailedError) -> None:
        self._failures.labels(worker.url, "moved" if failure.moved else str(failure.status)).inc()

    def prompt_was(self, call: Call, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens
        self._expected_tokens += call.expected_cached * prompt_tokens

    def ended(self, call: Call, *, known_model: bool) -> None:
        """Names and paths that clients make up must not become labels."""
        model = (call.peek.model or "") if known_model else ""
        self._requests[model, call.path if call.path in JSON_PATHS else "other", call.status] += 1
        self._latency[model].add(time.perf_counter() - call.began_s)
        if call.first_byte_s is not None:
            self._first_byte[model].add(call.first_byte_s)
        if call.queued_s:
            self._queued.inc(call.queued_s)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._counts()
        running, waiting = self._dispatch.active, self._dispatch.waiting
        yield GaugeMetricFamily("bough_gateway_running_requests", "Requests admitted and not ended", value=running)
        yield GaugeMetricFamily("bough_gateway_waiting_requests", "Requests in the queue", value=waiting)
        load = GaugeMetricFamily("bough_gateway_worker_load", "Requests at a worker", labels=["worker"])
        health = GaugeMetricFamily("bough_gateway_worker_healthy", "1 while in rotation", labels=["worker"])
        breaker = GaugeMetricFamily(
            "bough_gateway_breaker_state", "Circuit breaker: 0 closed, 1 open, 2 half open", labels=["worker"]
        )
        now_s = time.monotonic()
        for worker in self._workers:
            load.add_metric([worker.url], worker.load)
            health.add_metric([worker.url], float(worker.in_rotation))
            breaker.add_metric([worker.url], worker.breaker.state(now_s).value)
        yield from (load, health, breaker)

    def _counts(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "bough_gateway_requests", "Requests that have ended", labels=["model", "path", "status"]
        )
        for (model, path, status), count in self._requests.items():
            requests.add_metric([model, path, str(status)], count)
        attempts = CounterMetricFamily("bough_gateway_attempts", "Requests sent to workers", labels=["worker"])
        for url, count in self._attempts.items():
            attempts.add_metric([url], count)
        yield from (requests, attempts)
        for name, about, latencies in (
            ("request_seconds", "From arrival to the last byte", self._latency),
            ("first_byte_seconds", "From arrival to the first byte of the answer", self._first_byte),
        ):
            histogram = HistogramMetricFamily(f"bough_gateway_{name}", about, labels=["model"])
            for model, measured in latencies.items():
                histogram.add_metric([model], measured.buckets(), measured.sum_s)
            yield histogram
        for name, about, tokens in (
            ("prompt_tokens", "Prompt tokens, as workers reported", self._prompt_tokens),
            ("cached_tokens", "Of those, found in the cache, as workers reported", self._cached_tokens),
            ("expected_cached_tokens", "Of those, expected in the cache by the policy", self._expected_tokens),
        ):
            yield CounterMetricFamily(f"bough_gateway_{name}", about, value=tokens)


class Latencies:
    """A histogram; each count is of its bucket alone."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(LATENCIES_S) + 1)

    def add(self, seconds: float) -> None:
        self.sum_s += seconds
        self._counts[bisect.bisect_left(LATENCIES_S, seconds)] += 1

    def buckets(self) -> list[tuple[str, int]]:
        """As Prometheus has them: each with all below it."""
        bounds = [*map(floatToGoString, LATENCIES_S), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self._counts), strict=True))


def merged_pages(pages: Sequence[str]) -> bytes:
    """The pages of several processes as one: samples are added, except for states."""
    families: dict[str, Metric] = {}
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                if key not in sums:
                    sums[key] = sample.value
                    known.samples.append(sample)
                elif sample.name.endswith(STATES):
                    sums[key] = max(sums[key], sample.value)
                elif not sample.name.endswith("_created"):
                    sums[key] += sample.value
    for family in families.values():
        family.samples = [s._replace(value=sums[s.name, tuple(sorted(s.labels.items()))]) for s in family.samples]
    return families_page(families.values())
