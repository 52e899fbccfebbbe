"""Three real engines behind a gateway, killed one by one under load: no request fails and no output differs."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import aiohttp
import pytest

from tests.system.gateways import GatewayProcess, greedy, greedy_texts, running_gateway, stream_text

STREAMS = 12
KILLS = 3
PAUSE_S = 3.0  # between two kills
MAX_TOKENS = 32
PROMPTS = [f"Story number {number}: once upon a time, in a house with {number + 2} rooms," for number in range(STREAMS)]
ENGINE = ("--max-total-tokens", "20000", "--cpu-threads", "1", "--log-level", "warning")
GATEWAY = ("--launch", "3", "--health-check-interval-secs", "1", "--policy", "least_loaded")


async def kill_some(gateway: GatewayProcess) -> None:
    """Ends one healthy engine every few seconds, whenever another one is left."""
    kills = 0
    while kills < KILLS:
        await asyncio.sleep(PAUSE_S)
        workers = await asyncio.to_thread(gateway.workers)
        healthy = [worker for worker in workers if worker["is_healthy"]]
        if len(healthy) >= 2:
            os.kill(random.Random(kills).choice(healthy)["pid"], signal.SIGKILL)
            kills += 1


async def stream_on(gateway: GatewayProcess, expected: list[str], enough: asyncio.Event) -> None:
    """Keeps so many streams open; each ends as it would have undisturbed."""

    async def one(number: int) -> None:
        last = False
        while not last:
            last = enough.is_set()  # the last stream begins after the last kill
            text = await stream_text(client, gateway.url, greedy(PROMPTS[number], MAX_TOKENS))
            assert text == expected[number], f"prompt {number}"

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        await asyncio.gather(*(one(number) for number in range(STREAMS)))


@pytest.mark.slow
def test_killed_workers_cost_no_request_and_change_no_output() -> None:
    with running_gateway(*GATEWAY, "--", *ENGINE) as gateway:
        gateway.wait_for(3)
        expected = asyncio.run(greedy_texts(gateway.url, PROMPTS, MAX_TOKENS))

        async def disturbed() -> None:
            enough = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(stream_on(gateway, expected, enough))
                await kill_some(gateway)
                enough.set()

        asyncio.run(disturbed())
        gateway.wait_for(3)
        assert sum(worker["restarts"] for worker in gateway.workers()) >= KILLS
        assert gateway.stop() == 0
