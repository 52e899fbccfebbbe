"""The gateway's metrics for Prometheus. Counts are kept here; gauges of workers are read when the page is made."""

import time
from collections.abc import Iterator, Sequence
from functools import cache

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from bough.gateway.call import Call
from bough.gateway.dispatch import Dispatch
from bough.gateway.registry import Registry
from bough.gateway.responses import JSON_PATHS
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

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"bough_gateway_{name}", about, ["model"], buckets=LATENCIES_S, registry=registry)

        # What every request counts is found without looking for its labels each time, which costs most.
        self._requests = cache(counter("requests", "Requests that have ended", "model", "path", "status").labels)
        self.attempts = cache(counter("attempts", "Requests sent to workers", "worker").labels)
        self._latency = cache(histogram("request_seconds", "From arrival to the last byte").labels)
        first_byte = histogram("first_byte_seconds", "From arrival to the first byte of the answer")
        self._first_byte = cache(first_byte.labels)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens, as workers reported")
        self._cached_tokens = counter("cached_tokens", "Of those, found in the cache, as workers reported")
        self._expected_tokens = counter("expected_cached_tokens", "Of those, expected in the cache by the policy")
        self._queued = counter("queued_seconds", "Time that requests waited for a worker")
        self.failures = counter("attempt_failures", "Attempts that failed, by status", "worker", "status")
        self.retries = counter("retries", "Attempts made after a failed one")
        self.moves = counter("moves", "Requests moved away from a lost worker")
        self.hedges = counter("hedges", "Second workers asked beside a slow one")
        self.failovers = counter("stream_failovers", "Streams resumed on another worker")
        self.poisons = counter("poison_requests", "Requests that two workers failed at in the same way")
        self.rate_limited = counter("rate_limited", "Requests over a rate limit")
        registry.register(self)

    def prompt_was(self, call: Call, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._expected_tokens.inc(call.expected_cached * prompt_tokens)

    def ended(self, call: Call, *, known_model: bool) -> None:
        """Names and paths that clients make up must not become labels."""
        model = (call.peek.model or "") if known_model else ""
        self._requests(model, call.path if call.path in JSON_PATHS else "other", call.status).inc()
        self._latency(model).observe(time.perf_counter() - call.began_s)
        if call.first_byte_s is not None:
            self._first_byte(model).observe(call.first_byte_s)
        if call.queued_s:
            self._queued.inc(call.queued_s)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
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
