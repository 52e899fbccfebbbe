"""Notices an engine that lives but does not move.

A ping takes the way of a request through all processes. One that does not come back in time means that something on the
way is stuck: the server then says so on `/health`, and every process is made to print where it is. When the engine
moves again, so does the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from bough.client.handle import EngineClient
from bough.core.errors import EngineDeadError

log = logging.getLogger(__name__)

# Shares of the watchdog's time: a hang is noticed when a ping was sent after it began and has not come back, so the
# pause between two pings and the patience with one make up the whole.
PAUSE, PATIENCE = 0.25, 0.75
LONGEST_PAUSE_S = 10.0


class Watchdog:
    """Owns the question whether the engine moves. `on_stuck` prints the stacks."""

    def __init__(self, client: EngineClient, timeout_s: float, on_stuck: Callable[[], None]) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self.stuck = False

    @property
    def complaint(self) -> str:
        return f"The engine has not moved for {self._timeout_s:g} s (--watchdog-timeout); the log shows where it is."

    async def run(self) -> None:
        """Watches until cancelled, or until the engine has died, which others report."""
        pause_s = min(self._timeout_s * PAUSE, LONGEST_PAUSE_S)
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._ping()
            except EngineDeadError:
                return

    async def _ping(self) -> None:
        sent = time.monotonic()
        ping = asyncio.ensure_future(self._client.ping())
        try:
            await asyncio.wait({ping}, timeout=self._timeout_s * PATIENCE)
            if not ping.done():
                self.stuck = True
                log.error("%s", self.complaint)
                self._on_stuck()
            await ping
        finally:
            ping.cancel()
        if self.stuck:
            self.stuck = False
            log.warning("the engine moves again, after %.1f s", time.monotonic() - sent)
