"""The progress line of the log: what runs, how full memory is, how fast it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bough.scheduler.assembly import PlannedStep
from bough.scheduler.commit import Committer
from bough.scheduler.prefix_cache import PrefixCache
from bough.scheduler.rows import RowTable

log = logging.getLogger(__name__)


class Stats:
    """Owns the figures since the last line."""

    def __init__(self, interval: int, clock: Callable[[], float]) -> None:
        self._interval = interval
        self._clock = clock
        self._steps = 0
        self._since = clock()
        self._tokens = 0
        self.throughput = 0.0

    def after_step(
        self, step: PlannedStep, committer: Committer, cache: PrefixCache, table: RowTable, queued: int
    ) -> None:
        self._steps += 1
        if not self._interval or self._steps < self._interval:
            return
        now = self._clock()
        self.throughput = (committer.generated_tokens - self._tokens) / max(now - self._since, 1e-9)
        self._steps, self._since, self._tokens = 0, now, committer.generated_tokens
        total = cache.pool.total * cache.page_size
        hit = committer.cached_tokens / max(committer.prompt_tokens, 1)
        log.info(
            "running %d, queued %d, token usage %.2f (%d of %d), cache hit rate %.2f, %.1f tokens/s",
            *(table.running, queued, cache.used_tokens / total, cache.used_tokens, total, hit, self.throughput),
        )

    def idle(self) -> None:
        """A pause is over when the next step runs; it must not count as slow work."""
        self._steps, self._since = 0, self._clock()
