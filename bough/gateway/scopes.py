"""Ending somebody else's `asyncio.timeout` early: whoever waits in it gets a `TimeoutError`."""

from __future__ import annotations

import asyncio
import contextlib


def end_scope(scope: asyncio.Timeout, after_s: float | None = None) -> None:
    """At once, or after a time. Without effect where the scope is being left already, by its own time or in any other
    way."""
    with contextlib.suppress(RuntimeError):
        scope.reschedule(0.0 if after_s is None else asyncio.get_running_loop().time() + after_s)  # 0 has passed
