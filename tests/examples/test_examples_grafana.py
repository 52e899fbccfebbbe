"""The dashboard is whole, and asks only for metrics that exist, in the way that fits their kind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bough.observability.metrics import ALL_METRICS, names_of

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "examples/grafana/bough.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
SERIES = {
    name + suffix: metric.kind
    for metric in ALL_METRICS
    for name in names_of(metric, "bough")
    for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


def test_only_series_that_exist_are_asked_for() -> None:
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    for query in (*QUERIES, *variables):
        names = re.findall(r"bough:\w+", query)
        assert names and set(names) <= SERIES.keys(), query


def test_what_only_grows_is_shown_as_a_rate_and_nothing_else_is() -> None:
    for query in QUERIES:
        for rate, name in re.findall(r"(rate\()?(bough:\w+)", query):
            assert bool(rate) == (SERIES[name] != "gauge"), query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query


def test_every_metric_has_its_place() -> None:
    shown = set(re.findall(r"bough:\w+", " ".join(QUERIES)))
    named = {name for metric in ALL_METRICS for name in names_of(metric, "bough")}
    missing = {name for name in named if not any(each.startswith(name) for each in shown)}
    assert missing == {"bough:gen_throughput"}, "its panel takes the rate of the tokens, which is exact"


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)
