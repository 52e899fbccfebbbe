"""Where the time of one answer went, as the client sees it: for responses, and for the meter of the process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bough.core.finish import FinishAbort
from bough.messages.outputs import Delta, Started
from bough.observability.request_meter import RequestMeter


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. Queue and prefill are the engine's own figures, the total is the client's."""

    queue_s: float
    prefill_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def first_token_s(self) -> float:
        return self.queue_s + self.prefill_s

    @property
    def decode_s(self) -> float:
        return max(0.0, self.total_s - self.first_token_s)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the decode, so without the first token; None where there was nothing to measure."""
        decoded = self.output_tokens - 1
        return decoded / self.decode_s if decoded > 0 and self.decode_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        rate = self.tokens_per_second
        return {
            "queue_s": round(self.queue_s, 6),
            "prefill_s": round(self.prefill_s, 6),
            "prefill_cached_tokens": self.cached_tokens,
            "prefill_new_tokens": self.prompt_tokens - self.cached_tokens,
            "time_to_first_token_s": round(self.first_token_s, 6),
            "decode_s": round(self.decode_s, 6),
            "tokens_per_second": None if rate is None else round(rate, 3),
            "total_s": round(self.total_s, 6),
        }

    def to_header(self, *, finished: bool = True) -> str:
        """The value of a `Server-Timing` header, in milliseconds; of an unfinished answer only what cannot change."""
        parts = {"queue": self.queue_s, "prefill": self.prefill_s, "ttft": self.first_token_s}
        if finished:
            parts |= {"decode": self.decode_s, "total": self.total_s}
        entries = [f"{name};dur={seconds * 1000:.3f}" for name, seconds in parts.items()]
        entries.append(f'tokens;desc="cached={self.cached_tokens} new={self.prompt_tokens - self.cached_tokens}"')
        rate = self.tokens_per_second
        if finished and rate is not None:
            entries.append(f'tokens_per_second;desc="{rate:.3f}"')
        return ", ".join(entries)


class LatencyRecorder:
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

    def abandon(self, retractions: int) -> None:
        if not self._ended:
            self._end(time.perf_counter(), retractions, incomplete=True)

    def _start(self, started: Started, tokens: int, now: float) -> bool:
        """The prompt has been computed. Returns whether a first token came with it, which is then counted."""
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
