"""The progress line of the log: what runs, how full memory is, how fast it goes, how busy the device is."""

import logging
from collections.abc import Callable

from bough.scheduler.commit import Committer
from bough.scheduler.prefix_cache import PrefixCache
from bough.scheduler.rows import RowTable

log = logging.getLogger(__name__)

Span = tuple[float, float]  # seconds, from..to
WINDOW_STEPS = 40  # that figures are taken over where no line is logged


class BusyShare:
    """The share of time in which a step was on the device, over windows of `steps` steps.

    Time goes from the end of one step to the end of the next, both taken on the device, so that it does not matter how
    late the host looks. Time without work does not count.
    """

    def __init__(self, steps: int) -> None:
        self._window = steps
        self._steps = 0
        self._busy_s = 0.0
        self._total_s = 0.0
        self._last_end: float | None = None  # None: time begins with the next step
        self.share: float | None = None  # of the last whole window; until there is one, of the steps before a pause

    def add(self, span: Span | None) -> None:
        """A step was on the device from..to; None: the executor does not know."""
        if span is None:
            return
        start, end = span
        self._busy_s += end - start
        self._total_s += end - (start if self._last_end is None else self._last_end)
        self._last_end = end
        self._steps += 1
        if self._steps >= self._window and self._total_s > 0:
            self.share = min(self._busy_s / self._total_s, 1.0)
            self._steps, self._busy_s, self._total_s = 0, 0.0, 0.0

    def pause(self) -> None:
        self._last_end = None
        if self.share is None and self._total_s > 0:
            self.share = min(self._busy_s / self._total_s, 1.0)


class Stats:
    def __init__(self, interval: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps = 0
        self._since = clock()
        self._tokens = 0
        self.throughput = 0.0
        self.forward_s = {"extend": 0.0, "decode": 0.0, "mixed": 0.0}  # that steps of each category took
        self.set_interval(interval)
        self.busy = BusyShare(self._interval)

    @property
    def figures(self) -> dict[str, object]:
        busy, speed = self.busy.share, self.throughput
        return {"forward_seconds": self.forward_s, "last_gen_throughput": speed, "device_busy_share": busy}

    def set_interval(self, steps: int) -> None:
        """How many steps lie between two lines; 0: there are none."""
        self._logs = steps > 0
        self._interval = steps or WINDOW_STEPS

    def after_step(
        self, category: str, span: Span | None, committer: Committer, cache: PrefixCache, table: RowTable, queued: int
    ) -> None:
        self.busy.add(span)
        if span is not None:
            self.forward_s[category] += span[1] - span[0]
        self._steps += 1
        if self._steps < self._interval:
            return
        now = self._clock()
        self.throughput = (committer.generated_tokens - self._tokens) / max(now - self._since, 1e-9)
        self._steps, self._since, self._tokens = 0, now, committer.generated_tokens
        if self._logs:
            self._log(committer, cache, table, queued)

    def idle(self) -> None:
        """A pause is over when the next step runs; it must not count as slow work."""
        self._steps, self._since = 0, self._clock()
        self.busy.pause()

    def _log(self, committer: Committer, cache: PrefixCache, table: RowTable, queued: int) -> None:
        total = cache.pool.total * cache.page_size
        hit = committer.cached_tokens / max(committer.prompt_tokens, 1)
        busy = "" if self.busy.share is None else f", device busy {self.busy.share:.0%}"
        log.info(
            "running %d, queued %d, token usage %.2f (%d of %d), cache hit rate %.2f, %.1f tokens/s%s",
            *(table.running, queued, cache.used_tokens / total, cache.used_tokens, total, hit, self.throughput, busy),
        )
