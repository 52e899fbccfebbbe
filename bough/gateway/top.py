"""`bough gateway top`: a live table of a gateway's workers in the terminal. Asks the gateway, keeps nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bough.gateway.admin_client import AdminClient

COLOURS = {"healthy": "green", "draining": "yellow", "starting": "cyan", "unhealthy": "red"}
PREFIX = "bough_gateway_"
SHOWN_ERROR = 40
COLUMNS = ("id", "url", "model", "state", "breaker", "load", "reported", "restarts", "last error")
NUMBERS = ("load", "reported", "restarts")
BY_WORTH = ("url", "state", "load", "id", "breaker", "last error", "model", "restarts", "reported")
GAP = 3  # cells between two columns


def show(client: AdminClient, interval_s: float, rounds: int | None = None) -> None:
    with Live(screen=rounds is None, auto_refresh=False) as live:
        while True:
            numbers = figures(client.text("/metrics"))
            live.update(picture(client.workers(), numbers, live.console.width), refresh=True)
            if rounds is not None:
                rounds -= 1
                if rounds <= 0:
                    break
            time.sleep(interval_s)
    if not live.console.is_terminal:
        live.console.line()  # which a table in a file lacks at its end


def picture(workers: Sequence[Mapping[str, Any]], numbers: Mapping[str, float], width: int) -> Group:
    """Shows the columns that fit."""
    rows = [_cells(worker) for worker in workers]
    shown = _fitting(rows, width)
    table = Table(title="workers", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in COLUMNS:
        if name in shown:
            table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell for name, cell in row.items() if name in shown))
    return Group(_summary(numbers), table)


def _cells(worker: Mapping[str, Any]) -> dict[str, Text]:
    limit = worker["limit"] or worker["capacity"]
    return {
        "id": Text(worker["id"]),
        "url": Text(worker["url"]),
        "model": Text(worker["model_id"] or "?"),
        "state": Text(worker["state"], COLOURS.get(worker["state"], "")),
        "breaker": Text(worker["breaker"], "" if worker["breaker"] == "closed" else "red"),
        "load": Text(f"{worker['load']}/{limit}" if limit else str(worker["load"])),
        "reported": Text(f"{worker['reported_load']:g}"),
        "restarts": Text(str(worker["restarts"])),
        "last error": Text((worker["last_error"] or "")[:SHOWN_ERROR]),
    }


def _fitting(rows: Sequence[Mapping[str, Text]], width: int) -> set[str]:
    shown: set[str] = set()
    left = width
    for name in BY_WORTH:
        needed = max([len(name), *(row[name].cell_len for row in rows)]) + GAP
        if needed <= left + GAP or not shown:
            shown.add(name)
            left -= needed
    return shown


def _summary(numbers: Mapping[str, float]) -> Text:
    prompt = numbers.get("prompt_tokens_total", 0.0)
    shares = [numbers.get(name, 0.0) / prompt if prompt else 0.0 for name in CACHE_FIGURES]
    parts = [f"{label} {numbers.get(name, 0.0):g}" for name, label in SUMMARY.items()]
    return Text("   ".join([*parts, f"cached {shares[0]:.0%} (expected {shares[1]:.0%})"]), "bold")


CACHE_FIGURES = ("cached_tokens_total", "expected_cached_tokens_total")
SUMMARY = {
    "requests_total": "requests",
    "running_requests": "running",
    "waiting_requests": "waiting",
    "retries_total": "retries",
    "moves_total": "moves",
    "stream_failovers_total": "failovers",
    "rate_limited_total": "over the rate",
}


def figures(page: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums
