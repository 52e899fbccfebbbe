"""How fast one answer comes, told to the meter of its process.

Owns when its last tokens came. Times are those of the client, which is what a caller sees; only where the first token
came together with others is the engine's own figure taken for it.
"""

from __future__ import annotations

import time

from bough.core.finish import FinishAbort
from bough.messages.outputs import Delta, Started
from bough.observability.request_meter import RequestMeter


class Pace:
    """From a request's arrival to its end."""

    __slots__ = ("_ended", "_last_at", "_meter", "_received_at", "_tokens")

    def __init__(self, meter: RequestMeter, received_at: float) -> None:
        self._meter = meter
        self._received_at = self._last_at = received_at
        self._tokens = 0
        self._ended = False

    def add(self, delta: Delta, tokens: int, now: float) -> None:
        more = tokens
        if delta.started is not None:
            more -= self._start(delta.started, tokens, now)
        if more:
            self._meter.more_tokens(more, now - self._last_at)
            self._last_at = now
        self._tokens += tokens
        if delta.finish is not None:
            self._end(now, delta.retractions, incomplete=isinstance(delta.finish, FinishAbort))

    def leave(self, retractions: int) -> None:
        """The caller waits no longer."""
        if not self._ended:
            self._end(time.perf_counter(), retractions, incomplete=True)

    def _start(self, started: Started, tokens: int, now: float) -> bool:
        """The prompt has been computed; whether there is a first token, which has then been counted."""
        self._meter.started(started.prompt_tokens, started.cached_tokens, started.queue_time_s)
        if not tokens:
            return False
        self._last_at = now
        if tokens > 1:
            self._last_at = min(self._received_at + started.queue_time_s + started.prefill_time_s, now)
        self._meter.first_token(self._last_at - self._received_at)
        return True

    def _end(self, now: float, retractions: int, *, incomplete: bool) -> None:
        self._ended = True
        self._meter.ended(self._tokens, now - self._received_at, retractions, incomplete=incomplete)
