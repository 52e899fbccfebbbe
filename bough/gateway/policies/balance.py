"""When load outweighs the cache: the switch shared by the policies that look for cached prefixes.

Sending every request to where its prefix lies lets one hot prefix drown one worker. While the loads are far apart in
number and in proportion, the least loaded worker gets the request; it caches the prefix too, so a hot prefix spreads to
as many workers as its traffic needs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from bough.core.errors import SettingsError
from bough.gateway.policies.interface import Choice, WorkerView
from bough.gateway.policies.plain import least_loaded


class Balance:
    """The three numbers of the switch, and the dice for ties."""

    def __init__(
        self, cache_threshold: float, balance_abs_threshold: int, balance_rel_threshold: float, seed: int | None
    ) -> None:
        if not 0.0 <= cache_threshold <= 1.0:
            raise SettingsError(f"cache_threshold is a share between 0 and 1, got {cache_threshold}.")
        if balance_abs_threshold < 0 or balance_rel_threshold < 1.0:
            raise SettingsError("balance_abs_threshold must be at least 0, and balance_rel_threshold at least 1.")
        self._cache_threshold = cache_threshold
        self._most_apart = balance_abs_threshold
        self._most_times = balance_rel_threshold
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
            best = max(cached.get(worker.id, 0.0) for worker in workers)
            if best > self._cache_threshold:
                taken = least_loaded([w for w in workers if cached.get(w.id, 0.0) == best], self._dice)
            else:
                taken = least_loaded(workers, self._dice)
        return Choice(taken.id, cached.get(taken.id, 0.0))
