"""Says when something that is done once in a while is due, from the times that a policy is told."""

from __future__ import annotations


class Interval:
    """Remembers when it was last due. The first time it is told only starts it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last_s: float | None = None

    def due(self, now_s: float) -> bool:
        if self._last_s is not None and now_s - self._last_s < self._seconds:
            return False
        began = self._last_s is None
        self._last_s = now_s
        return not began
