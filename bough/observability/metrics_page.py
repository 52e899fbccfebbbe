"""The `/metrics` page in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from bough.observability.metrics import STATE_METRICS, Metric, State, state_figures
from bough.observability.request_meter import slices

CONTENT_TYPE = CONTENT_TYPE_LATEST
RANK_LABELS = {"tp_rank": "0", "pp_rank": "0"}  # the scheduler's figures are those of the first rank


def metrics_page(totals: Sequence[float], state: State | None, model_name: str) -> bytes:
    """`totals` are a `RequestMeter`'s; without a state the scheduler's metrics are left out."""
    labels = _labels(model_name)
    families = [_family(metric, numbers, labels) for metric, numbers in slices(totals).items()]
    return families_page(families + ([] if state is None else _state_families(state, labels)))


def state_page(state: State, model_name: str) -> bytes:
    return families_page(_state_families(state, _labels(model_name)))


def _labels(model_name: str) -> dict[str, str]:
    return {"model_name": model_name, "engine_type": "unified"}


def _state_families(state: State, labels: Mapping[str, str]) -> list[Family]:
    figures = state_figures(state)
    metrics = (each.metric for each in STATE_METRICS if each.metric.name in figures)
    return [_family(metric, [figures[metric.name]], {**labels, **RANK_LABELS}) for metric in metrics]


def families_page(families: Iterable[Family]) -> bytes:
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
