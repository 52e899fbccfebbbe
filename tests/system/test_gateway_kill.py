"""Three real engines behind a gateway, killed one by one under load: no request fails and no output differs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import aiohttp
import pytest

from tests.system.gateways import GatewayProcess, greedy, greedy_texts, running_gateway, stream_text

STREAMS = 32
SECONDS = 60.0
PAUSE_S = 5.0  # between two kills
MAX_TOKENS = 32
PROMPTS = [f"Story number {number}: once upon a time, in a house with {number + 2} rooms," for number in range(STREAMS)]
ENGINE = ("--max-total-tokens", "20000", "--log-level", "warning")
GATEWAY = ("--launch", "3", "--health-check-interval-secs", "1", "--policy", "least_loaded")


async def kill_for_a_while(gateway: GatewayProcess, until_s: float) -> int:
    """Ends one healthy engine every few seconds, as long as another one is left; how many."""
    kills = 0
    while time.monotonic() < until_s:
        await asyncio.sleep(PAUSE_S)
        workers = await asyncio.to_thread(gateway.workers)
        healthy = [worker for worker in workers if worker["is_healthy"]]
        if len(healthy) >= 2:
            os.kill(random.Random(kills).choice(healthy)["pid"], signal.SIGKILL)
            kills += 1
    return kills


async def stream_for_a_while(gateway: GatewayProcess, expected: list[str], until_s: float) -> int:
    """Keeps so many streams open; how many ended, each as it would have undisturbed."""
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        while time.monotonic() < until_s:
            text = await stream_text(client, gateway.url, greedy(PROMPTS[number], MAX_TOKENS))
            assert text == expected[number], f"prompt {number}"
            done += 1

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        await asyncio.gather(*(one(number) for number in range(STREAMS)))
    return done


@pytest.mark.slow
def test_killed_workers_cost_no_request_and_change_no_output() -> None:
    with running_gateway(*GATEWAY, "--", *ENGINE) as gateway:
        gateway.wait_for(3)
        expected = asyncio.run(greedy_texts(gateway.url, PROMPTS, MAX_TOKENS))

        async def disturbed() -> tuple[int, int]:
            until_s = time.monotonic() + SECONDS
            return await asyncio.gather(
                stream_for_a_while(gateway, expected, until_s), kill_for_a_while(gateway, until_s)
            )

        done, kills = asyncio.run(disturbed())
        assert kills >= 3 and done >= STREAMS, (done, kills)
        gateway.wait_for(3)
        assert sum(worker["restarts"] for worker in gateway.workers()) >= kills
        assert gateway.stop() == 0
