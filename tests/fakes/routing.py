"""Short ways to write snapshots and requests in the tests of routing policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bough.gateway.policies import RoutingRequest, WorkerView


@dataclass(frozen=True)
class Snapshot:
    id: str
    url: str
    load: int
    reported_load: float
    other_load: float = 0.0
    prefill_tokens: float = 0.0
    speed: float | None = None


def worker(name: str, load: int = 0, reported: float = 0.0) -> WorkerView:
    return Snapshot(id=name, url=f"http://{name}:30000", load=load, reported_load=reported)


def fleet(*loads: int) -> list[WorkerView]:
    """Workers a, b, c … with these loads."""
    return [worker(chr(ord("a") + i), load) for i, load in enumerate(loads)]


def request(
    text: str = "",
    *,
    ids: Sequence[int] | None = None,
    session: str | None = None,
    target: str | None = None,
) -> RoutingRequest:
    return RoutingRequest(
        model="m", text=text, token_ids=None if ids is None else tuple(ids), session=session, target=target
    )
