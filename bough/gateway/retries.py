"""When a failed attempt is followed by another: how long to wait, and whether the gateway can afford it.

Pure values and counts; the loop that tries is in `attempts`.
"""

from __future__ import annotations

from dataclasses import dataclass

BUSY_STATUSES = frozenset({408, 429})
NOT_IMPLEMENTED = 501  # by the worker's kind, not by its condition: it would say the same again
BUDGET_RESERVE = 100.0  # retries that may follow each other at once: a worker with many requests may die
BUDGET_FLOOR_PER_S = 10.0  # retries that are always allowed: a gateway with few requests may retry each of them


def is_failure(status: int) -> bool:
    """Whether a worker that answers so has not done its work."""
    return status in BUSY_STATUSES or status >= 500


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that grow, spread so that those who failed together do not come back together."""

    initial_s: float = 0.05
    longest_s: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2

    def pause_s(self, retry: int, chance: float) -> float:
        """Before the `retry`-th further attempt, counted from 0; `chance` is between 0 and 1."""
        # The exponent is bounded: beyond it any pause is the longest, and the power would overflow.
        base = min(self.initial_s * self.multiplier ** min(retry, 200), self.longest_s)
        return base * (1.0 + self.jitter * (2.0 * chance - 1.0))


class RetryBudget:
    """Retries cost one, requests earn a fraction, and a little comes with time: when everything fails, most give up."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._left = BUDGET_RESERVE
        self._seen_s: float | None = None

    def earn(self) -> None:
        """A request has come."""
        self._left = min(BUDGET_RESERVE, self._left + self._ratio)

    def spend(self, now_s: float) -> bool:
        """Whether one more retry may be made; it is then counted."""
        if self._seen_s is not None:
            self._left = min(BUDGET_RESERVE, self._left + (now_s - self._seen_s) * BUDGET_FLOOR_PER_S)
        self._seen_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
