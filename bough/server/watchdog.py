"""Notices an engine that is alive but makes no progress.

A ping takes the path of a request through all processes. While one does not return in time, `/health` returns a 503,
and every process prints its stacks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from bough.client.handle import EngineClient
from bough.core.errors import EngineDeadError
from bough.messages.requests import Ping

log = logging.getLogger(__name__)

# Shares of the watchdog's time: a hang is noticed when a ping was sent after it began and has not returned, so the
# interval between two pings and the timeout of one add up to the whole.
PING_INTERVAL, PING_TIMEOUT = 0.25, 0.75
MAX_PING_INTERVAL_S = 10.0


class Watchdog:
    """Owns whether the engine hangs. `on_stuck` prints the stacks."""

    def __init__(self, client: EngineClient, timeout_s: float, on_stuck: Callable[[], None]) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self.stuck = False

    @property
    def message(self) -> str:
        return f"The engine has not moved for {self._timeout_s:g} s (--watchdog-timeout); the log shows where it is."

    async def run(self) -> None:
        """Watches until cancelled, or until the engine has died, which others report."""
        interval_s = min(self._timeout_s * PING_INTERVAL, MAX_PING_INTERVAL_S)
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._ping()
            except EngineDeadError:
                return

    async def _ping(self) -> None:
        sent = time.monotonic()
        ping = asyncio.ensure_future(self._client.call(Ping))
        try:
            await asyncio.wait({ping}, timeout=self._timeout_s * PING_TIMEOUT)
            if not ping.done():
                self.stuck = True
                log.error("%s", self.message)
                self._on_stuck()
            await ping
        finally:
            ping.cancel()
        if self.stuck:
            self.stuck = False
            log.warning("the engine moves again, after %.1f s", time.monotonic() - sent)
