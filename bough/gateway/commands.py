"""The commands that talk to a running gateway's management routes.

`bough gateway roll` replaces its workers one by one, so that no request fails. The gateway restarts workers that it has
launched. Others are replaced by a worker at another address (`--replace OLD NEW`), which must be in rotation before the
old one is drained and removed. `bough gateway top` is a live table of the workers in the terminal.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bough.core.errors import BoughError
from bough.gateway.registry import normal_url
from bough.gateway.worker import worker_id

TIMEOUT_S = 30.0
POLL_S = 0.2
COLOURS = {"healthy": "green", "draining": "yellow", "starting": "cyan", "unhealthy": "red"}
PREFIX = "bough_gateway_"
SHOWN_ERROR = 40
COLUMNS = ("id", "url", "model", "state", "breaker", "load", "reported", "restarts", "last error")
NUMBERS = ("load", "reported", "restarts")
BY_WORTH = ("url", "state", "load", "id", "breaker", "last error", "model", "restarts", "reported")
GAP = 3  # cells between two columns
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
Say = Callable[[str], None]


class AdminClient:
    """Short calls to a gateway. A redirect is an error: following it would carry the admin key elsewhere."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    def workers(self) -> Any:
        return self.call("GET", "/workers").json()["workers"]

    def worker(self, identity: str) -> Any:
        return self.call("GET", f"/workers/{identity}").json()

    def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            response = httpx.request(method, self.url + path, json=body, headers=self._headers, timeout=TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BoughError(f"There is no gateway at {self.url}: {error}; give its address with --url.") from None
        if not response.is_success:
            raise BoughError(f"{self.url}{path} answered {response.status_code}: {_message(response)}")
        return response


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


# ---- roll


def roll(
    client: AdminClient,
    replacements: Sequence[tuple[str, str]],
    timeout_s: float,
    say: Say = print,
    worker_api_key: str | None = None,
) -> None:
    """Without replacements, restarts the launched workers. `worker_api_key` is the key of the new workers: the gateway
    never sends its own to a worker that was added over HTTP."""
    if replacements:
        for old, new in replacements:
            _replace(client, normal_url(old), normal_url(new), worker_api_key, timeout_s, say)
        return
    mine = [worker for worker in client.workers() if worker["source"] == "launch"]
    if not mine:
        problem = "The gateway has started none of its workers, so it cannot restart them"
        raise BoughError(f"{problem}; start others and give `--replace OLD_URL NEW_URL` for each.")
    for worker in mine:
        _restart(client, worker["id"], timeout_s, say)


def _restart(client: AdminClient, identity: str, timeout_s: float, say: Say) -> None:
    before = client.worker(identity)
    say(f"{before['url']}: draining")
    client.call("POST", f"/workers/{identity}/restart")

    def replaced() -> bool:
        worker = client.worker(identity)
        return bool(worker["restarts"] > before["restarts"] and worker["state"] == "healthy")

    _wait(replaced, timeout_s, f"{before['url']} did not come back")
    say(f"{before['url']}: serves again")


def _replace(client: AdminClient, old: str, new: str, api_key: str | None, timeout_s: float, say: Say) -> None:
    if not any(worker["id"] == worker_id(old) for worker in client.workers()):
        raise BoughError(f"The gateway has no worker at {old}; `bough gateway top` shows those that it has.")
    added = client.call("POST", "/workers", {"url": new, "api_key": api_key}).json()["id"]
    say(f"{new}: waiting for its checks")
    _wait(lambda: client.worker(added)["state"] == "healthy", timeout_s, f"{new} has not passed its checks")
    client.call("POST", f"/workers/{worker_id(old)}/drain")
    say(f"{old}: draining")
    _wait(lambda: not client.worker(worker_id(old))["load"], timeout_s, f"{old} still has requests")
    client.call("DELETE", f"/workers/{worker_id(old)}")
    say(f"{old}: removed")


def _wait(condition: Callable[[], bool], timeout_s: float, problem: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BoughError(f"{problem} within {timeout_s:g} s (--timeout-s); the others are as they were.")
        time.sleep(POLL_S)


# ---- top


def show(client: AdminClient, interval_s: float, rounds: int | None = None) -> None:
    with Live(screen=rounds is None, auto_refresh=False) as live:
        for number in itertools.count() if rounds is None else range(max(1, rounds)):
            time.sleep(interval_s if number else 0.0)
            numbers = figures(client.call("GET", "/metrics").text)
            live.update(picture(client.workers(), numbers, live.console.width), refresh=True)
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


def figures(page: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums
