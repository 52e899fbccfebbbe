"""What the gateway and its routing policies say to each other: snapshots in, a choice out.

A policy sees a `WorkerView` of every worker that may take a request now (healthy, not draining, breaker closed), and
never the registry itself: it can neither hold a worker that is gone nor change one. One instance serves one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec


class WorkerView(msgspec.Struct, frozen=True):
    """A worker as it was when the request came; a struct, because each request makes one of every worker."""

    id: str
    url: str
    load: int  # requests in flight from this gateway
    reported_load: float  # requests that the worker last reported in /v1/loads


class RoutingRequest(msgspec.Struct, frozen=True):
    """What of a request bears on where it should go."""

    model: str
    text: str  # the prompt: messages joined; ids as a string of numbers when only ids came
    token_ids: tuple[int, ...] | None
    session: str | None  # the routing key header (X-SMG-Routing-Key, X-Session-Id)
    target: str | None  # X-SMG-Target-Worker: the id or URL of a worker


class Choice(msgspec.Struct, frozen=True):
    """The worker that should take the request, and which share of its prompt (0..1) it is expected to have cached."""

    worker_id: str
    expected_cached: float = 0.0


class Policy:
    """Chooses among workers, of which there is always one. Owns at most what it remembers of earlier requests; touches
    no clock and no socket."""

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        """Under every policy a request that names its worker gets it, and a session stays where it is."""
        return self.pick(_allowed(workers, request), request)

    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        """The policy's own choice."""
        raise NotImplementedError

    def routed(self, worker_id: str, request: RoutingRequest) -> None:
        """The choice took effect: the worker is assumed to hold the request's prefix."""

    def removed(self, worker_id: str) -> None:
        """The worker has left for good, and its cache with it."""

    def tick(self, now_s: float) -> None:
        """Called about once a second with the time of a steady clock: eviction and other housekeeping."""


def ranking(key: str, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """The workers in the order in which they are to take this key, by a hash of both (rendezvous hashing).

    Every gateway finds the same order without shared state, because it knows a worker by the same URL. A worker that
    leaves moves only its own keys, and they spread over all others.
    """
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return sorted(workers, key=lambda w: blake2b(w.url.encode(), digest_size=8, key=digest).digest(), reverse=True)


def _allowed(workers: Sequence[WorkerView], request: RoutingRequest) -> Sequence[WorkerView]:
    """The one worker that a request is pinned to, or all. A named worker that cannot take requests is passed over."""
    if request.target is not None:
        named = [worker for worker in workers if request.target in (worker.id, worker.url)]
        if named:
            return named
    return workers if request.session is None else ranking(request.session, workers)[:1]
