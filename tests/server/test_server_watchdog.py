"""The watchdog: it barks once when nothing comes back, and is quiet again when something does."""

from __future__ import annotations

import asyncio

from bough.core.errors import EngineDeadError
from bough.messages.outputs import Reply
from bough.messages.requests import Ping
from bough.server.watchdog import Watchdog
from tests.server.native_engine import NativeEngine


def test_it_notices_stillness_and_recovery() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: None)
        barks: list[int] = []
        watchdog = Watchdog(engine.client, 0.02, lambda: barks.append(1))
        task = asyncio.ensure_future(watchdog.run())
        while len(engine.commands) < 3:
            await asyncio.sleep(0.001)
        assert not watchdog.stuck
        engine.silent = True
        while not watchdog.stuck:
            await asyncio.sleep(0.001)
        assert barks == [1] and "--watchdog-timeout" in watchdog.message
        engine.silent = False
        last = engine.commands[-1]
        assert isinstance(last, Ping)
        engine.client.receive(Reply(last.call, True))
        while watchdog.stuck:
            await asyncio.sleep(0.001)
        engine.silent = True
        engine.client.die(EngineDeadError("dead"))
        await task

    asyncio.run(go())
