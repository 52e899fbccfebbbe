"""Notices an engine that is alive but makes no progress.

A ping takes the path of a request through all processes. While one does not return in time, `/health` returns a 503,
and every process prints its stacks. Of several replicas, those that hang while others move are ended.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bough.client.handle import EngineClient
from bough.core.errors import EngineDeadError

log = logging.getLogger(__name__)

# Shares of the watchdog's time: a hang is noticed when a ping was sent after it began and has not returned, so the
# interval between two pings and the timeout of one add up to the whole.
PING_INTERVAL, PING_TIMEOUT = 0.25, 0.75
MAX_PING_INTERVAL_S = 10.0
STACKS_S = 1.0  # for a replica that is about to be ended


@dataclass(slots=True)
class Watchdog:
    """Owns whether the engine hangs. `on_stuck` prints the stacks, `end_replica` ends one of several for a reason; None
    where the engine has one, or several that cannot go on without each other."""

    _client: EngineClient
    _timeout_s: float
    _on_stuck: Callable[[], None]
    _end_replica: Callable[[int, str], None] | None = None
    stuck: bool = field(default=False, init=False)

    @property
    def message(self) -> str:
        return self._still("The engine")

    def _still(self, who: str) -> str:
        return f"{who} has not moved for {self._timeout_s:g} s (--watchdog-timeout); the log shows where it is."

    async def run(self) -> None:
        """Watches until cancelled, or until the engine has died, which others report."""
        interval_s = min(self._timeout_s * PING_INTERVAL, MAX_PING_INTERVAL_S)
        moved = time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            try:
                silent = await self._client.silent_replicas(self._timeout_s * PING_TIMEOUT)
            except EngineDeadError:
                return
            if silent and (self._end_replica is None or len(silent) == self._client.replica_count):
                if not self.stuck:
                    log.error("%s", self.message)
                    self._on_stuck()
                self.stuck = True
                continue
            if self.stuck:
                log.warning("the engine moves again, after %.1f s", time.monotonic() - moved)
            self.stuck, moved = False, time.monotonic()
            if silent and self._end_replica is not None:
                self._on_stuck()
                await asyncio.sleep(STACKS_S)
                for number in silent:
                    self._end_replica(number, self._still(f"Replica {number}"))
