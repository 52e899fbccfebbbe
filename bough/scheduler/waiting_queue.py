"""The requests that wait for a row, in order of arrival; policies reorder a view of it, never the queue itself."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from bough.scheduler.request import Request


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
        del self._requests[self._index(request)]

    def snapshot(self) -> list[Request]:
        return list(self._requests)

    def _index(self, request: Request) -> int:
        index = bisect.bisect_left(self._requests, request.arrival, key=lambda r: r.arrival)
        assert self._requests[index] is request
        return index
