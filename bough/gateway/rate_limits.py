"""Token buckets: how many requests a second may come, over all clients and for each key.

Over the rate means refused at once, with the time after which it makes sense to try again; nothing is ever queued for
it. Buckets are told the time and own nothing but their level.
"""

from __future__ import annotations

from collections.abc import Sequence


class TokenBucket:
    """Fills at `rate` per second up to `burst`."""

    def __init__(self, rate: float, burst: float | None = None) -> None:
        self.rate = rate
        self.burst = max(1.0, rate if burst is None else burst)
        self._level = self.burst
        self._seen_s: float | None = None

    def wait_s(self, now_s: float) -> float:
        """How long until a request may pass; 0 when one may at once. Takes nothing."""
        if self._seen_s is not None:
            self._level = min(self.burst, self._level + (now_s - self._seen_s) * self.rate)
        self._seen_s = now_s
        return 0.0 if self._level >= 1.0 else (1.0 - self._level) / self.rate

    def take(self) -> None:
        self._level -= 1.0


def take_from_all(buckets: Sequence[TokenBucket], now_s: float) -> float:
    """0 and a token from every bucket; or the wait, and nothing taken: a refusal must not use up other limits."""
    wait_s = max((bucket.wait_s(now_s) for bucket in buckets), default=0.0)
    if not wait_s:
        for bucket in buckets:
            bucket.take()
    return wait_s
