"""The policies that look at load alone, or at nothing: random, round robin, power of two choices, least loaded.

Load is what this gateway knows best: its own requests in flight. Where two workers are level in that, what they
reported themselves decides (other gateways may be sending to them too), and then chance, so that an idle fleet is
filled evenly and not from the top of the list.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bough.gateway.policies.interface import Choice, RoutingRequest, WorkerView


def pressure(worker: WorkerView) -> tuple[int, float]:
    """How busy a worker is, to be compared with others: our requests in flight, then what it reported."""
    return worker.load, worker.reported_load


def least_loaded(workers: Sequence[WorkerView], dice: random.Random) -> WorkerView:
    """The least busy worker; among equals, one by chance."""
    least = min(map(pressure, workers))
    return dice.choice([worker for worker in workers if pressure(worker) == least])


class Stateless:
    """What a policy without memory does when it is told of requests and workers: nothing."""

    def routed(self, worker_id: str, request: RoutingRequest) -> None:
        return

    def removed(self, worker_id: str) -> None:
        return

    def tick(self, now_s: float) -> None:
        return


class RandomPolicy(Stateless):
    """Any worker, each as likely as the next."""

    def __init__(self, seed: int | None = None) -> None:
        self._dice = random.Random(seed)

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        return Choice(self._dice.choice(workers).id)


class RoundRobinPolicy(Stateless):
    """Each worker in turn. Remembers the last one by id, so that workers that come and go do not disturb the turn."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        ids = sorted(worker.id for worker in workers)
        self._last = next((other for other in ids if other > self._last), ids[0])
        return Choice(self._last)


class PowerOfTwoPolicy(Stateless):
    """The less busy of two workers drawn by chance: nearly as even as the least loaded, without herding."""

    def __init__(self, seed: int | None = None) -> None:
        self._dice = random.Random(seed)

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        drawn = self._dice.sample(workers, min(2, len(workers)))
        return Choice(min(drawn, key=pressure).id)


class LeastLoadedPolicy(Stateless):
    """The worker with the fewest requests in flight."""

    def __init__(self, seed: int | None = None) -> None:
        self._dice = random.Random(seed)

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        return Choice(least_loaded(workers, self._dice).id)
