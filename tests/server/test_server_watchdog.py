"""The watchdog: it barks once when nothing comes back, and is quiet again when something does."""

from __future__ import annotations

import asyncio

import pytest

from bough.client.handle import EngineClient
from bough.client.replicas import Replicas
from bough.core.errors import EngineDeadError
from bough.messages.outputs import ReplicaLost, Reply
from bough.messages.requests import Ping
from bough.server import watchdog as module
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


class Pinged:
    """A replica that answers pings until it hangs."""

    def __init__(self, bench: dict[str, EngineClient]) -> None:
        self._bench, self.hangs, self.pings = bench, False, 0

    def send(self, *messages: object) -> None:
        for message in messages:
            assert isinstance(message, Ping)
            self.pings += 1
            if not self.hangs:
                asyncio.get_running_loop().call_soon(self._bench["client"].receive, Reply(message.call, True))


@pytest.mark.parametrize("apart", [True, False])
def test_a_replica_that_hangs_is_ended_while_others_move(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STACKS_S", 0.0)

    async def go() -> None:
        bench: dict[str, EngineClient] = {}
        replicas = [Pinged(bench) for _ in range(3)]
        client = bench["client"] = EngineClient(Replicas(replicas), None)
        ended: list[int] = []
        barks: list[int] = []

        def end(number: int, reason: str) -> None:
            assert reason.startswith(f"Replica {number} has not moved for 0.02 s (--watchdog-timeout)")
            ended.append(number)
            client.receive(ReplicaLost(number, reason))

        watchdog = Watchdog(client, 0.02, lambda: barks.append(1), end if apart else None)
        task = asyncio.ensure_future(watchdog.run())
        replicas[1].hangs = True
        while not (ended or watchdog.stuck):
            await asyncio.sleep(0.001)
        assert (ended, watchdog.stuck, barks) == (([1], False, [1]) if apart else ([], True, [1]))
        replicas[0].hangs = replicas[2].hangs = True  # the rest: there is nobody to serve on
        while not watchdog.stuck or replicas[0].pings < 9:
            await asyncio.sleep(0.001)
        assert ended == ([1] if apart else [])
        for replica in replicas:
            replica.hangs = False
        while watchdog.stuck:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(go())
