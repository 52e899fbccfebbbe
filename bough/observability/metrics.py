"""Every metric, from `metrics.toml`, which says its name and buckets, and how the scheduler's are worked out.

`request_meter` counts the request metrics; the scheduler's are read from its state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bough.core.files import table_beside

State = Mapping[str, Any]  # the scheduler's reply to `GetState`
_TABLE = table_beside(__file__, "metrics.toml")


@dataclass(frozen=True, slots=True, eq=False)  # there is one of each: compared by identity, which is quick
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    buckets: tuple[float, ...] = ()
    key: Any = None  # of the scheduler's state, if not its name
    label: str = ""  # what tells its numbers apart, where it has several


def _metric(name: str, stated: Any) -> Metric:
    fields = {"about": stated} if isinstance(stated, str) else dict(stated)
    buckets = tuple(_TABLE["buckets"].get(fields.pop("buckets", None), ()))
    kind: Any = "histogram" if buckets else "counter" if name.endswith("_total") else "gauge"
    return Metric(name, kind, buckets=buckets, **fields)


def _metrics(section: str) -> tuple[Metric, ...]:
    return tuple(_metric(name, stated) for name, stated in _TABLE[section].items())


REQUEST_METRICS, STATE_METRICS, LABELLED_METRICS, START_METRICS = map(
    _metrics, ("request", "state", "labelled", "start")
)
ALL_METRICS = (*REQUEST_METRICS, *STATE_METRICS, *LABELLED_METRICS, *START_METRICS)
BY_NAME = {metric.name: metric for metric in ALL_METRICS}
# Figures that are no number of the state.
WORKED_OUT: Mapping[str, Callable[[State], float]] = {
    "token_usage": lambda s: s["num_used_tokens"] / max(s["max_total_num_tokens"], 1),
    "cache_hit_rate": lambda s: s["cached_tokens"] / max(s["prompt_tokens"], 1),
    "gen_throughput": lambda s: s["last_gen_throughput"] if s["num_running_reqs"] else 0.0,
    "spec_accept_length": lambda s: 1.0 + s["spec_num_correct_drafts"] / max(s["spec_verify_ct"], 1),
    "spec_accept_rate": lambda s: s["spec_num_correct_drafts"] / max(s["spec_num_proposed_drafts"], 1),
}


def names_of(metric: Metric, style: str) -> list[str]:
    """What a metric is called on a page in another engine's names; some have two there."""
    return [f"{style}:{name}" for name in _TABLE["other_names"].get(style, {}).get(metric.name, (metric.name,))]


def state_figures(state: State) -> dict[str, float]:
    """Without what this engine does not have."""
    read = {metric.name: state.get(metric.key or metric.name) for metric in STATE_METRICS}
    read |= {name: figure(state) for name, figure in WORKED_OUT.items()}
    return {name: value for name, value in read.items() if value is not None}


def start_figures(limits: State) -> dict[str, float]:
    """Of an engine that announced them; else none."""
    if not {"memory_usage", "startup_time"} <= limits.keys():
        return {}
    read = {metric.name: limits[metric.key[0]][metric.key[1]] for metric in START_METRICS}
    return {name: value for name, value in read.items() if value is not None}
