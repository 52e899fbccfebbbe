"""How fast one answer comes, told to the meter of its process.

Owns when its last tokens came. Times are those of the client, which is what a caller sees; only where the first token
came together with others is the engine's own figure taken for it.
"""

from __future__ import annotations

import time

from bough.core.finish import FinishAbort
from bough.messages.outputs import Delta
from bough.observability.request_meter import RequestMeter


class Pace:
    """From a request's arrival to its end."""

    __slots__ = ("_ended", "_last_at", "_meter", "_received_at", "_tokens")

    def __init__(self, meter: RequestMeter, received_at: float) -> None:
        self._meter = meter
        self._received_at = self._last_at = received_at
        self._tokens = 0
        self._ended = False

    def add(self, delta: Delta, tokens: int) -> None:
        now = time.perf_counter()
        started = delta.started
        if started is not None:
            self._meter.started(started.prompt_tokens, started.cached_tokens, started.queue_time_s)
        if tokens:
            more = tokens
            if not self._tokens:
                if tokens > 1 and started is not None:
                    self._last_at += min(started.queue_time_s + started.prefill_time_s, now - self._last_at)
                else:
                    self._last_at = now
                self._meter.first_token(self._last_at - self._received_at)
                more -= 1
            if more:
                self._meter.more_tokens(more, now - self._last_at)
            self._tokens += tokens
            self._last_at = now
        if delta.finish is not None:
            self._end(now, delta.retractions, incomplete=isinstance(delta.finish, FinishAbort))

    def leave(self, retractions: int) -> None:
        """The caller waits no longer."""
        if not self._ended:
            self._end(time.perf_counter(), retractions, incomplete=True)

    def _end(self, now: float, retractions: int, *, incomplete: bool) -> None:
        self._ended = True
        self._meter.ended(self._tokens, now - self._received_at, retractions, incomplete=incomplete)
