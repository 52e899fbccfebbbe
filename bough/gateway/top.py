"""`bough gateway top`: a live table of a gateway's workers in the terminal. Asks the gateway, keeps nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bough.gateway.admin_client import AdminClient

COLOURS = {"healthy": "green", "draining": "yellow", "starting": "cyan", "unhealthy": "red"}
PREFIX = "bough_gateway_"
SHOWN_ERROR = 40


def show(client: AdminClient, interval_s: float, rounds: int | None = None) -> None:
    """Until Ctrl-C, or for some rounds."""
    with Live(screen=rounds is None, auto_refresh=False) as live:
        while True:
            live.update(picture(client.workers(), figures(client.text("/metrics"))), refresh=True)
            if rounds is not None:
                rounds -= 1
                if rounds <= 0:
                    return
            time.sleep(interval_s)


def picture(workers: Sequence[Mapping[str, Any]], numbers: Mapping[str, float]) -> Group:
    table = Table(title="workers", expand=True)
    for name in ("id", "url", "model", "state", "breaker", "load", "reported", "restarts", "last error"):
        table.add_column(name, justify="right" if name in ("load", "reported", "restarts") else "left")
    for worker in workers:
        limit = worker["limit"] or worker["capacity"]
        table.add_row(
            worker["id"],
            worker["url"],
            worker["model_id"] or "?",
            Text(worker["state"], COLOURS.get(worker["state"], "")),
            Text(worker["breaker"], "" if worker["breaker"] == "closed" else "red"),
            f"{worker['load']}/{limit}" if limit else str(worker["load"]),
            f"{worker['reported_load']:g}",
            str(worker["restarts"]),
            (worker["last_error"] or "")[:SHOWN_ERROR],
        )
    return Group(_summary(numbers), table)


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
    """The gateway's figures, each summed over its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums
