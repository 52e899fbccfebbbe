"""Several clients of one engine: whose commands come first."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from bough.client.handle import EngineClient
from bough.client.replicas import Replicas
from bough.launch.client_end import take_turn
from bough.messages.outputs import Reply


class Scheduler:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.got += messages


def test_commands_of_two_clients_reach_all_replicas_in_one_order(tmp_path: Path) -> None:
    async def go() -> None:
        replicas = [Scheduler(), Scheduler()]
        turn = partial(take_turn, tmp_path)
        first, second = (EngineClient(Replicas(replicas), None, number, turn=turn) for number in (0, 1))
        calls = [asyncio.create_task(client.release_memory(None)) for client in (first, second)]
        for client, count in ((first, 1), (second, 2)):
            while len(replicas[0].got) < count:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)  # the other one looks, and waits
            assert [len(replica.got) for replica in replicas] == [count, count]
            for replica in replicas:
                client.receive(Reply(replica.got[-1].call, True, "Released."))
        assert [reply.message for reply in await asyncio.gather(*calls)] == ["Released."] * 2

    asyncio.run(go())
