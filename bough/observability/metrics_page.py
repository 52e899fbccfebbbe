"""The `/metrics` page: counts and the scheduler's state in the text format of Prometheus.

Keeps nothing: the page is made of numbers that others own, each time somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from bough.observability.metrics import STATE_METRICS, Metric, State
from bough.observability.request_meter import slices

CONTENT_TYPE = CONTENT_TYPE_LATEST
RANK_LABELS = {"tp_rank": "0", "pp_rank": "0"}  # the scheduler's figures are those of the first rank


def metrics_page(totals: Sequence[float], state: State | None, model_name: str) -> bytes:
    """`totals` are those of a `RequestMeter`; without a state the scheduler's metrics are left out."""
    labels = {"model_name": model_name, "engine_type": "unified"}
    families = [_family(metric, numbers, labels) for metric, numbers in slices(totals).items()]
    if state is not None:
        read = ((each.metric, each.read(state)) for each in STATE_METRICS)
        families += [_family(metric, [value], labels | RANK_LABELS) for metric, value in read if value is not None]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        yield from self._families


def _family(metric: Metric, numbers: Sequence[float], labels: Mapping[str, str]) -> Family:
    names, values = list(labels), list(labels.values())
    match metric.kind:
        case "counter":
            counter = CounterMetricFamily(metric.full_name, metric.about, labels=names)
            counter.add_metric(values, numbers[0])
            return counter
        case "gauge":
            gauge = GaugeMetricFamily(metric.full_name, metric.about, labels=names)
            gauge.add_metric(values, numbers[0])
            return gauge
        case "histogram":
            bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
            histogram = HistogramMetricFamily(metric.full_name, metric.about, labels=names)
            histogram.add_metric(values, list(zip(bounds, accumulate(numbers[:-1]), strict=True)), numbers[-1])
            return histogram
