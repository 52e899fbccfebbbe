"""Routes a request to the worker that was sent most of its text before.

While loads are far apart the least loaded worker gets the request, so that a hot prefix spreads. `max_load_factor`
skips workers whose load is that much above the mean.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bough.core.errors import SettingsError
from bough.gateway.policies import Choice, Policy, RoutingRequest, WorkerView
from bough.gateway.policies.plain import least_loaded
from bough.gateway.policies.text_tree import TextTree

BURST = 2  # times the size of the tree, between two evictions
SPARE = 8  # requests above the mean that count for nothing, so that a quiet fleet keeps its prefixes together


@dataclass(eq=False)
class TextTreePolicy(Policy):
    """Remembers which texts each worker was sent."""

    eviction_interval_secs: float = 60.0
    max_tree_size: int = 2**26
    seed: int | None = None

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._sent = TextTree()
        self._now_s = 0.0
        self._evicted_s = 0.0

    def routed(self, worker_id: str, request: RoutingRequest) -> None:
        self._sent.insert(request.text, worker_id, self._now_s)
        self._sent.shrink(worker_id, BURST * self.max_tree_size)

    def removed(self, worker_id: str) -> None:
        self._sent.remove(worker_id)

    def tick(self, now_s: float) -> None:
        self._now_s = now_s
        if now_s - self._evicted_s >= self.eviction_interval_secs:
            self._evicted_s = now_s
            self._sent.evict(self.max_tree_size)


@dataclass(eq=False)
class CacheAwarePolicy(TextTreePolicy):
    """Defaults are those of SGLang."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    max_load_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.cache_threshold <= 1.0:
            raise SettingsError(f"cache_threshold is a share between 0 and 1, got {self.cache_threshold}.")
        if self.balance_abs_threshold < 0 or self.balance_rel_threshold < 1.0:
            raise SettingsError("balance_abs_threshold must be at least 0, and balance_rel_threshold at least 1.")
        if self.max_load_factor is not None and self.max_load_factor < 1.0:
            raise SettingsError(f"max_load_factor must be at least 1, got {self.max_load_factor}.")

    def cached(self, request: RoutingRequest) -> Mapping[str, float]:
        """The share of the prompt that each worker is expected to hold."""
        chars = len(request.text)
        return {worker: length / chars for worker, length in self._sent.match(request.text).items()}

    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        cached = self.cached(request)
        loads = [worker.load for worker in workers]
        most, least = max(loads), min(loads)
        if most - least > self.balance_abs_threshold and most > self.balance_rel_threshold * least:
            taken = least_loaded(workers, self._dice)
        else:
            fit = workers
            if self.max_load_factor is not None:  # the least loaded is always within it
                limit = self.max_load_factor * sum(loads) / len(loads) + SPARE
                fit = [worker for worker in workers if worker.load <= limit]
            best = max(cached.get(worker.id, 0.0) for worker in fit)
            held = best > self.cache_threshold
            taken = least_loaded([w for w in fit if not held or cached.get(w.id, 0.0) == best], self._dice)
        return Choice(taken.id, cached.get(taken.id, 0.0))
