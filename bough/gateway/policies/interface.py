"""What the gateway and its routing policies say to each other: snapshots in, a choice out.

The gateway builds a `WorkerView` of every worker that may take a request right now (healthy, not draining, breaker
closed) and asks the policy of the request's model. A policy never sees the registry itself, so it can neither hold a
worker that is gone nor change one. Snapshots are structs, which are cheap to make: each request makes one of every
worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class WorkerView(msgspec.Struct, frozen=True):
    """A worker as it was when the request came."""

    id: str
    url: str
    load: int  # requests in flight from this gateway
    reported_load: float  # tokens or requests that the worker last reported in /v1/loads
    capacity: int | None  # requests at once that it is said to take; None: unknown


class RoutingRequest(msgspec.Struct, frozen=True):
    """What of a request bears on where it should go."""

    model: str
    text: str  # the prompt: messages joined; ids as a string of numbers when only ids came
    token_ids: tuple[int, ...] | None
    session: str | None  # the routing key header (X-SMG-Routing-Key, X-Session-Id)
    target: str | None  # X-SMG-Target-Worker: the id or URL of a worker


class Choice(msgspec.Struct, frozen=True):
    """The worker that should take the request, and which share of its prompt (0..1) is thought to be cached there."""

    worker_id: str
    expected_cached: float = 0.0


class Policy(Protocol):
    """Chooses among workers. `workers` is never empty."""

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice: ...

    def routed(self, worker_id: str, request: RoutingRequest) -> None:
        """The choice took effect: from here on the worker is assumed to hold the request's prefix."""
        ...

    def removed(self, worker_id: str) -> None:
        """The worker has left for good, and its cache with it."""
        ...

    def tick(self, now_s: float) -> None:
        """Called about once a second with the time of a steady clock: eviction and other housekeeping."""
        ...
