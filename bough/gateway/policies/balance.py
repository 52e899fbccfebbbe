"""When load outweighs the cache: the switch shared by the policies that look for cached prefixes.

Sending every request to where its prefix lies lets one hot prefix drown one worker. While the loads are far apart in
number and in proportion, the least loaded worker gets the request; it caches the prefix too, so a hot prefix spreads to
as many workers as its traffic needs. A load factor does the same more finely: workers whose load is that much above the
mean are passed over, and the next best holder of the prefix gets the request.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from bough.core.errors import SettingsError
from bough.gateway.policies.interface import Choice, WorkerView
from bough.gateway.policies.plain import least_loaded

SPARE = 8  # requests above the mean that count for nothing, so that a quiet fleet keeps its prefixes together


class Balance:
    """The numbers of the switch, and the dice for ties."""

    def __init__(
        self,
        cache_threshold: float,
        balance_abs_threshold: int,
        balance_rel_threshold: float,
        max_load_factor: float | None,
        seed: int | None,
    ) -> None:
        if not 0.0 <= cache_threshold <= 1.0:
            raise SettingsError(f"cache_threshold is a share between 0 and 1, got {cache_threshold}.")
        if balance_abs_threshold < 0 or balance_rel_threshold < 1.0:
            raise SettingsError("balance_abs_threshold must be at least 0, and balance_rel_threshold at least 1.")
        if max_load_factor is not None and max_load_factor < 1.0:
            raise SettingsError(f"max_load_factor must be at least 1, got {max_load_factor}.")
        self._cache_threshold = cache_threshold
        self._most_apart = balance_abs_threshold
        self._most_times = balance_rel_threshold
        self._load_factor = max_load_factor
        self._dice = random.Random(seed)

    def tilted(self, workers: Sequence[WorkerView]) -> bool:
        """Whether the loads are so far apart that they decide alone."""
        loads = [worker.load for worker in workers]
        most, least = max(loads), min(loads)
        return most - least > self._most_apart and most > self._most_times * least

    def choose(self, workers: Sequence[WorkerView], cached: Mapping[str, float]) -> Choice:
        """`cached` is the share of the prompt that each worker is thought to hold; absent workers hold nothing."""
        if self.tilted(workers):
            taken = least_loaded(workers, self._dice)
        else:
            fit = self._within_factor(workers)
            best = max(cached.get(worker.id, 0.0) for worker in fit)
            held = best > self._cache_threshold
            taken = least_loaded([w for w in fit if not held or cached.get(w.id, 0.0) == best], self._dice)
        return Choice(taken.id, cached.get(taken.id, 0.0))

    def _within_factor(self, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
        """Those whose load is not too far above the mean; the least loaded is always among them."""
        if self._load_factor is None:
            return workers
        most = self._load_factor * sum(worker.load for worker in workers) / len(workers) + SPARE
        return [worker for worker in workers if worker.load <= most]
