"""Notices a worker that says nothing for a while in the middle of an attempt: it may be dead without a sign.

Asking for a check costs nothing if the worker is only busy. One timer per attempt, looked at when its time has passed,
so that hearing something is nearly free. Owns that timer.
"""

from __future__ import annotations

import asyncio

from bough.gateway.worker import Worker


class Silence:
    """Suspects a worker once for each silence of `after_s`; ended by its owner."""

    def __init__(self, worker: Worker, after_s: float) -> None:
        self._worker = worker
        self._after_s = after_s
        self._heard = self._asked = False
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def heard(self) -> None:
        self._heard = True

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._heard:
            self._heard = self._asked = False
        elif not self._asked:
            self._asked = True
            self._worker.suspect()
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._look)
