"""Ending somebody else's `asyncio.timeout` early: whoever waits in it gets a `TimeoutError`."""

from __future__ import annotations

import asyncio
import contextlib


def end_scope(scope: asyncio.Timeout) -> None:
    """Without effect where the scope is being left already, by its own time or in any other way."""
    with contextlib.suppress(RuntimeError):
        scope.reschedule(0.0)  # a time that has passed
