"""Policies that remember nothing of prompts: by load, in turn, at random, or by a hash.

Load is this gateway's requests in flight; the reported load breaks ties, because other gateways may send too.
"""

import math
import random
from collections.abc import Sequence

from bough.core.errors import SettingsError
from bough.gateway.policies import Choice, Policy, RoutingRequest, WorkerView, ranking

CHARS_PER_TOKEN = 4  # of English text; only so that a length in tokens means about the same for text


def pressure(worker: WorkerView) -> tuple[int, float]:
    return worker.load, worker.reported_load


def least_loaded(workers: Sequence[WorkerView], dice: random.Random) -> WorkerView:
    """The least busy worker; a random one among equals."""
    least = min(map(pressure, workers))
    return dice.choice([worker for worker in workers if pressure(worker) == least])


class RandomPolicy(Policy):
    def __init__(self, seed: int | None = None) -> None:
        self._dice = random.Random(seed)

    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        return Choice(self._dice.choice(workers).id)


class PowerOfTwoPolicy(RandomPolicy):
    """The less busy of two random workers."""

    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        return Choice(min(self._dice.sample(workers, min(2, len(workers))), key=pressure).id)


class LeastLoadedPolicy(RandomPolicy):
    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        return Choice(least_loaded(workers, self._dice).id)


class RoundRobinPolicy(Policy):
    """Remembers the last worker by id, so that workers may come and go."""

    def __init__(self) -> None:
        self._last = ""

    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        ids = sorted(worker.id for worker in workers)
        self._last = next((other for other in ids if other > self._last), ids[0])
        return Choice(self._last)


class ConsistentHashingPolicy(Policy):
    """By the routing key; a request without one by its whole prompt."""

    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        return Choice(ranking(request.session or request.text, workers)[0].id)


class PrefixHashPolicy(Policy):
    """By the beginning of the prompt, while that worker's load is within `load_factor` of the mean."""

    def __init__(self, prefix_token_count: int = 256, load_factor: float = 1.25) -> None:
        if prefix_token_count < 1 or load_factor < 1.0:
            raise SettingsError("prefix_hash needs a prefix_token_count and a load_factor of at least 1.")
        self._tokens = prefix_token_count
        self._load_factor = load_factor

    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        if request.token_ids is not None:
            prefix = ",".join(map(str, request.token_ids[: self._tokens]))
        else:
            prefix = request.text[: self._tokens * CHARS_PER_TOKEN]
        mean = (sum(worker.load for worker in workers) + 1) / len(workers)  # this request counts as well
        most = math.ceil(self._load_factor * mean)
        # The mean never exceeds the limit, so some worker is always below it.
        return Choice(next(worker.id for worker in ranking(prefix, workers) if worker.load < most))
