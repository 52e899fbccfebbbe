"""The gateway's metrics for Prometheus. Counts are kept here; gauges of workers are read when the page is made."""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
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
BOUNDS = (*(str(float(bound)) for bound in LATENCIES_S), "+Inf")
Counts = defaultdict[tuple[str, ...], float]


class GatewayMetrics(Collector):
    """Counts are numbers by their labels: Prometheus's own take four calls and a lock each, for every request."""

    def __init__(self, workers: Registry, dispatch: Dispatch) -> None:
        self._workers = workers
        self._dispatch = dispatch
        self._began_s = time.time()
        self._counters: list[tuple[CounterMetricFamily, Counts]] = []
        # By model: a latency's counts up to each bound, and the sum.
        self._whole: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(BOUNDS) + 1))
        self._first: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(BOUNDS) + 1))

        def counter(name: str, about: str, *labels: str) -> Counts:
            counts = Counts(float, {} if labels else {(): 0.0})
            self._counters.append((CounterMetricFamily(f"bough_gateway_{name}", about, labels=labels), counts))
            return counts

        self._requests = counter("requests", "Requests that have ended", "model", "path", "status")
        self.attempts = counter("attempts", "Requests sent to workers", "worker")
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
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def prompt_was(self, call: Call, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens[()] += prompt_tokens
        self._cached_tokens[()] += cached_tokens
        self._expected_tokens[()] += call.expected_cached * prompt_tokens

    def ended(self, call: Call, took_s: float, *, known_model: bool) -> None:
        """Names and paths that clients make up must not become labels."""
        model, path = (call.peek.model or "") if known_model else "", call.path
        self._requests[model, path if path in JSON_PATHS else "other", str(call.status)] += 1
        _observe(self._whole, model, took_s)
        if call.first_byte_s is not None:
            _observe(self._first, model, call.first_byte_s)
        if call.queued_s:
            self._queued[()] += call.queued_s

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for family, counts in self._counters:
            family.samples.clear()
            for labels, count in counts.items():
                family.add_metric(labels, count, self._began_s)
            yield family
        for name, until, latencies in (
            ("request", "last byte", self._whole),
            ("first_byte", "first byte of the answer", self._first),
        ):
            histogram = HistogramMetricFamily(
                f"bough_gateway_{name}_seconds", f"From arrival to the {until}", labels=["model"]
            )
            for model, (*found, sum_s) in latencies.items():
                histogram.add_metric([model], list(zip(BOUNDS, accumulate(found), strict=True)), sum_s)
                histogram.add_sample(f"{histogram.name}_created", {"model": model}, self._began_s)
            yield histogram
        running, waiting = self._dispatch.active, self._dispatch.waiting
        yield GaugeMetricFamily("bough_gateway_running_requests", "Requests admitted and not ended", value=running)
        yield GaugeMetricFamily("bough_gateway_waiting_requests", "Requests in the queue", value=waiting)
        load = GaugeMetricFamily("bough_gateway_worker_load", "Requests at a worker", labels=["worker"])
        health = GaugeMetricFamily("bough_gateway_worker_healthy", "1 while in rotation", labels=["worker"])
        about = "Circuit breaker: 0 closed, 1 open, 2 half open"
        breaker = GaugeMetricFamily("bough_gateway_breaker_state", about, labels=["worker"])
        now_s = time.monotonic()
        for worker in self._workers:
            load.add_metric([worker.url], worker.load)
            health.add_metric([worker.url], float(worker.in_rotation))
            breaker.add_metric([worker.url], worker.breaker.state(now_s).value)
        yield from (load, health, breaker)


def _observe(latencies: dict[str, list[float]], model: str, seconds: float) -> None:
    found = latencies[model]
    found[bisect_left(LATENCIES_S, seconds)] += 1
    found[-1] += seconds


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
