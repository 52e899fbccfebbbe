"""What holds under every policy: a request that names its worker gets it, and a session stays where it is.

A session's worker follows from a hash of its key, so any gateway sends it to the same one and none has to remember it.
A named worker that cannot take requests right now is replaced as if none had been named: an answer is worth more than
its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.gateway.policies.hashing import ranking
from bough.gateway.policies.interface import Choice, Policy, RoutingRequest, WorkerView


class PinningPolicy:
    """Narrows the workers to the one that a request is pinned to, and leaves the rest to another policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        return self.policy.choose(self._allowed(workers, request), request)

    def _allowed(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Sequence[WorkerView]:
        if request.target is not None:
            named = [worker for worker in workers if request.target in (worker.id, worker.url)]
            if named:
                return named
        if request.session is not None:
            return ranking(request.session.encode("utf-8", "surrogatepass"), workers)[:1]
        return workers

    def routed(self, worker_id: str, request: RoutingRequest) -> None:
        self.policy.routed(worker_id, request)

    def removed(self, worker_id: str) -> None:
        self.policy.removed(worker_id)

    def tick(self, now_s: float) -> None:
        self.policy.tick(now_s)
