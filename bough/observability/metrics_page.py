"""The `/metrics` page in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from bough.observability.metrics import (
    PROCESS_CPU_SECONDS,
    REALTIME_TOKENS,
    START_METRICS,
    STATE_METRICS,
    Metric,
    State,
    names_of,
    start_figures,
    state_figures,
)
from bough.observability.request_meter import slices

CONTENT_TYPE = CONTENT_TYPE_LATEST
RANK_LABELS = {"tp_rank": "0", "pp_rank": "0"}  # the scheduler's figures are those of the first rank


def metrics_page(
    totals: Sequence[float] | None,
    state: State | None,
    model_name: str,
    style: str = "bough",
    limits: State | None = None,
    cpu_seconds: Mapping[str, float] | None = None,
) -> bytes:
    """`totals` are a `RequestMeter`'s, `state` is the scheduler's, `limits` is what it announced at its start, and
    `cpu_seconds` are those of each component; what is None is left out. `style` says in whose names."""
    labels = {"model_name": model_name, "engine_type": "unified"}
    counted = {} if totals is None else slices(totals)
    families = [f for metric, numbers in counted.items() for f in _families(metric, numbers, labels, style)]
    families += _families(PROCESS_CPU_SECONDS, cpu_seconds or {}, labels, style)
    figures = {} if state is None else state_figures(state)
    figures |= start_figures(limits or {})
    labels |= RANK_LABELS
    told = [metric for metric in (*STATE_METRICS, *START_METRICS) if metric.name in figures]
    families += [f for metric in told for f in _families(metric, [figures[metric.name]], labels, style)]
    families += _families(REALTIME_TOKENS, (state or {}).get("realtime_tokens", {}), labels, style)
    return families_page(families)


def families_page(families: Iterable[Family]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        yield from self._families


Numbers = Sequence[float] | Mapping[str, float]  # by the metric's own label, where it has one


def _families(metric: Metric, numbers: Numbers, labels: Mapping[str, str], style: str) -> list[Family]:
    return [_family(name, metric, numbers, labels) for name in names_of(metric, style)] if numbers else []


def _family(name: str, metric: Metric, numbers: Numbers, labels: Mapping[str, str]) -> Family:
    names, values = list(labels), list(labels.values())
    if isinstance(numbers, Mapping):
        labelled = CounterMetricFamily(name, metric.about, labels=[*names, metric.label])
        for of, number in numbers.items():
            labelled.add_metric([*values, of], number)
        return labelled
    if metric.kind == "histogram":
        bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
        histogram = HistogramMetricFamily(name, metric.about, labels=names)
        histogram.add_metric(values, list(zip(bounds, accumulate(numbers[:-1]), strict=True)), numbers[-1])
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(name, metric.about, labels=names)
    family.add_metric(values, numbers[0])
    return family
