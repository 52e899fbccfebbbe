"""The `/metrics` page in the text format of Prometheus."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from bough.observability import metrics
from bough.observability.metrics import BY_NAME, Metric, State, names_of, start_figures, state_figures
from bough.observability.request_meter import slices

CONTENT_TYPE = CONTENT_TYPE_LATEST
RANK_LABELS = {"tp_rank": "0", "pp_rank": "0"}  # the scheduler's figures are those of the first rank


def metrics_page(
    totals: Sequence[float] | None,
    states: Sequence[State],
    model_name: str,
    style: str = "bough",
    limits: Sequence[State] = (),
    cpu_seconds: Mapping[str, float] | None = None,
) -> bytes:
    """`totals` are a `RequestMeter`'s, `states` are those of the schedulers that answer, `limits` what each announced
    at its start, and `cpu_seconds` are those of each component; what is None is left out. `style` says in whose
    names. Of several schedulers the figures have the label dp_rank."""
    labels = {"model_name": model_name, "engine_type": "unified"}
    counted = {} if totals is None else slices(totals)
    families = [f for metric, numbers in counted.items() for f in _families(metric, numbers, labels, style)]
    families += _families(BY_NAME["process_cpu_seconds_total"], cpu_seconds or {}, labels, style)
    labels |= RANK_LABELS
    for state in states:
        families += _replica_families(state, state_figures(state), labels, style)
    for announced in limits:
        families += _replica_families(announced, start_figures(announced), labels, style)
    merged: dict[str, Family] = {}
    for family in families:
        if family is not merged.setdefault(family.name, family):
            merged[family.name].samples += family.samples
    return families_page(merged.values())


def _replica_families(
    told: State, figures: Mapping[str, float], labels: dict[str, str], style: str
) -> Iterator[Family]:
    if "dp_rank" in told:
        labels = labels | {"dp_rank": str(told["dp_rank"])}
    for metric in (*metrics.STATE_METRICS, *metrics.START_METRICS):
        if metric.name in figures:
            yield from _families(metric, [figures[metric.name]], labels, style)
    for metric in metrics.LABELLED_METRICS:
        yield from _families(metric, told.get(metric.key, {}), labels, style)


def families_page(families: Iterable[Family]) -> bytes:
    return generate_latest(_Families(families))


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
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    if isinstance(numbers, Mapping):
        labelled = kind(name, metric.about, labels=[*names, metric.label])
        for of, number in numbers.items():
            labelled.add_metric([*values, of], number)
        return labelled
    if metric.kind == "histogram":
        bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
        histogram = HistogramMetricFamily(name, metric.about, labels=names)
        histogram.add_metric(values, list(zip(bounds, accumulate(numbers[:-1]), strict=True)), numbers[-1])
        return histogram
    family = kind(name, metric.about, labels=names)
    family.add_metric(values, numbers[0])
    return family
