"""What a worker says of itself: whether it is well, which models it has, what it can take, how busy it is.

Any OpenAI-compatible server will do: what it does not answer stays unknown. Reads with the gateway's HTTP client and
keeps nothing.
"""

from __future__ import annotations

import json
from typing import Any

from bough.gateway.upstream import Upstream
from bough.gateway.worker import Capabilities, Worker

UNKNOWN_ROUTE = frozenset({404, 405, 501})


async def is_well(upstream: Upstream, worker: Worker, timeout_s: float) -> None:
    """Raises what is wrong with the worker. One without `/health` is well when it lists its models."""
    status, _ = await upstream.get(worker, "/health", timeout_s)
    if status in UNKNOWN_ROUTE:
        status, _ = await upstream.get(worker, "/v1/models", timeout_s)
    if status != 200:
        raise ConnectionError(f"its health check answered {status}")


async def discover(upstream: Upstream, worker: Worker, timeout_s: float) -> Capabilities:
    """What the worker serves and can do."""
    listed = await _json(upstream, worker, "/v1/models", timeout_s)
    entries = listed.get("data")
    names = [str(entry["id"]) for entry in entries if _is_named(entry)] if isinstance(entries, list) else []
    info = await _json(upstream, worker, "/server_info", timeout_s)
    if not names and isinstance(info.get("model_path"), str):
        names = [str(info.get("served_model_name") or info["model_path"])]
    capacity = info.get("max_running_requests")
    return Capabilities(
        models=tuple(names),
        capacity=capacity if isinstance(capacity, int) and not isinstance(capacity, bool) else None,
        version=_text(info.get("version")),
        kv_events_config=_text(info.get("kv_events_config")),
    )


async def reported_load(upstream: Upstream, worker: Worker, timeout_s: float) -> float:
    """Requests that run and wait there, whoever sent them; 0 where the worker does not tell. An `OSError` where
    it does not answer at all."""
    loads = _object(*await upstream.get(worker, "/v1/loads", timeout_s)).get("loads")
    if not isinstance(loads, list):
        return 0.0
    figures = [load.get(name) for load in loads if isinstance(load, dict) for name in LOAD_FIGURES]
    return float(sum(figure for figure in figures if isinstance(figure, int | float)))


LOAD_FIGURES = ("num_running_reqs", "num_waiting_reqs")


def _is_named(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), str)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


async def _json(upstream: Upstream, worker: Worker, path: str, timeout_s: float) -> dict[str, Any]:
    """The JSON object at a path; empty where there is none."""
    try:
        return _object(*await upstream.get(worker, path, timeout_s))
    except OSError:
        return {}


def _object(status: int, body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body) if status == 200 else {}
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
