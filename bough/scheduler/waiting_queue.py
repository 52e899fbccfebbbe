"""The requests that wait for a row, in order of arrival, and those that have waited or run for too long.

Policies reorder a view of the queue, never the queue itself.
"""

import bisect
from collections.abc import Iterable, Iterator

from bough.core.finish import FinishAbort
from bough.scheduler.request import Request
from bough.scheduler.rows import RowTable

CHECK_INTERVAL_S = 0.2  # looking at every request each step would cost more than the precision is worth


class WaitingQueue:
    """Ordered by arrival, so a retracted request, which keeps its arrival, stands before younger ones."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=lambda r: r.arrival)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._requests, request.arrival, key=lambda r: r.arrival)
        assert self._requests[index] is request
        del self._requests[index]


class Timeouts:
    """Waiting counts from when a request last began to wait: one that ran and was retracted has not waited all that
    time. Running counts all its stays in a row and none of the waits between them. Off unless set."""

    def __init__(self, waiting_s: float | None, running_s: float | None) -> None:
        self._waiting_s = waiting_s
        self._running_s = running_s
        self._checked_at = float("-inf")

    def due(self, now: float, waiting: Iterable[Request], table: RowTable) -> list[tuple[Request, FinishAbort]]:
        """The requests whose time is up, with what to tell their callers."""
        if (self._waiting_s is None and self._running_s is None) or now - self._checked_at < CHECK_INTERVAL_S:
            return []
        self._checked_at = now
        texts: dict[Request, str] = {}
        if self._waiting_s is not None:
            text = f"The request waited longer than {self._waiting_s:g} s (--waiting-timeout-s)."
            texts |= {r: text for r in waiting if now - r.since > self._waiting_s}
        if self._running_s is not None:
            text = f"The request ran longer than {self._running_s:g} s (--running-timeout-s)."
            running = table.running_requests()
            texts |= {r: text for r in running if r.ran_s + now - r.since > self._running_s}
        return [(request, FinishAbort(text, 503, "TimeoutError")) for request, text in texts.items()]
