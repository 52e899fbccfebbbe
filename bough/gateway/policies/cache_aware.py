"""Routes a request to the worker that was sent most of its text before: no help from the workers needed.

Defaults are SGLang's: a match counts above 30 % of the prompt; loads decide alone when they are more than 64 requests
and 1.5 times apart; every minute each worker's share of the tree is cut to 2^26 characters. Until then it may grow to
twice as much, whatever comes. `max_load_factor` is our own and off unless asked for: it keeps a hot prefix from
crowding one worker long before the loads are so far apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.gateway.policies.balance import Balance
from bough.gateway.policies.housekeeping import Interval
from bough.gateway.policies.interface import Choice, RoutingRequest, WorkerView
from bough.gateway.policies.text_tree import TextTree

BURST = 2  # times the size of the tree, between two cuts


class CacheAwarePolicy:
    """Owns the tree of texts of one model."""

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        max_load_factor: float | None = None,
        eviction_interval_secs: float = 60.0,
        max_tree_size: int = 2**26,
        seed: int | None = None,
    ) -> None:
        self._balance = Balance(cache_threshold, balance_abs_threshold, balance_rel_threshold, max_load_factor, seed)
        self._evictions = Interval(eviction_interval_secs)
        self._max_tree_size = max_tree_size
        self._tree = TextTree()

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        chars = len(request.text)
        held = self._tree.match(request.text)
        return self._balance.choose(workers, {worker: length / chars for worker, length in held.items()})

    def routed(self, worker_id: str, request: RoutingRequest) -> None:
        self._tree.insert(request.text, worker_id)
        self._tree.evict(BURST * self._max_tree_size)

    def removed(self, worker_id: str) -> None:
        self._tree.remove(worker_id)

    def tick(self, now_s: float) -> None:
        if self._evictions.due(now_s):
            self._tree.evict(self._max_tree_size)
