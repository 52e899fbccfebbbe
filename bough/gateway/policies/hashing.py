"""The policies that place by hash: the same key goes to the same worker, through any gateway, without shared state.

Workers are ranked for a key by a hash of both (rendezvous hashing). A worker that leaves moves only the keys that it
had, and they spread over all others; one that comes takes an even share from each; nobody else's keys move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from bough.core.errors import SettingsError
from bough.gateway.policies.interface import Choice, RoutingRequest, WorkerView
from bough.gateway.policies.plain import Stateless

CHARS_PER_TOKEN = 4  # of English text; only so that a length in tokens means about the same for text


def ranking(key: bytes, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """The workers in the order in which they are to take this key."""
    digest = blake2b(key, digest_size=16).digest()

    def weight(worker: WorkerView) -> bytes:
        # By URL: gateways side by side know a worker by the same URL, whatever id each gave it.
        return blake2b(worker.url.encode(), digest_size=8, key=digest).digest()

    return sorted(workers, key=weight, reverse=True)


def prefix_of(request: RoutingRequest, tokens: int) -> bytes:
    """The beginning of a prompt, about `tokens` tokens of it, as a key."""
    if request.token_ids is not None:
        return ",".join(map(str, request.token_ids[:tokens])).encode()
    return request.text[: tokens * CHARS_PER_TOKEN].encode("utf-8", "surrogatepass")


class ConsistentHashingPolicy(Stateless):
    """By the routing key; a request without one is placed by its whole prompt."""

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        key = request.session or request.text
        return Choice(ranking(key.encode("utf-8", "surrogatepass"), workers)[0].id)


class PrefixHashPolicy(Stateless):
    """By the beginning of the prompt, as long as that worker's load is within `load_factor` of the mean."""

    def __init__(self, prefix_token_count: int = 256, load_factor: float = 1.25) -> None:
        if prefix_token_count < 1 or load_factor < 1.0:
            raise SettingsError("prefix_hash needs a prefix_token_count and a load_factor of at least 1.")
        self._tokens = prefix_token_count
        self._load_factor = load_factor

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        mean = (sum(worker.load for worker in workers) + 1) / len(workers)  # this request counts as well
        most = math.ceil(self._load_factor * mean)
        ranked = ranking(prefix_of(request, self._tokens), workers)
        # The mean never exceeds the limit, so somebody is always below it.
        return Choice(next(worker.id for worker in ranked if worker.load < most))
