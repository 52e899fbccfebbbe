"""The `cost` policy before real engines: short prompts spread evenly, and a worker that joins gets its share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.gateways import GatewayProcess, running_gateway
from tests.system.serving import TINY, running

ENGINE = (*TINY, "--log-level", "warning")
CLIENTS = 12
ENOUGH = 600  # requests for a measurement: on a busy machine a worker may be ahead for a while
EVEN = 1.2  # times the mean that the busiest worker may get


class Load:
    """Clients that each send a short prompt as soon as they have the answer to the one before."""

    def __init__(self, gateway: GatewayProcess, client: aiohttp.ClientSession) -> None:
        self._url = gateway.url
        self._client = client
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:  # one that fails ends them all
            clients = [group.create_task(self._send()) for _ in range(CLIENTS)]
            yield
            for client in clients:
                client.cancel()

    async def _send(self) -> None:
        while True:
            number = next(self._numbers)
            sampling = {"max_new_tokens": 4 + number % 9, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": [5, 6, 7, 8, number % 100, number // 100 % 100], "sampling_params": sampling}
            async with self._client.post(f"{self._url}/generate", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()

    async def shares(self, workers: int) -> list[float]:
        """What each worker gets of the next requests, over the mean; the least first."""
        before = await self._attempts()
        while True:
            await asyncio.sleep(0.1)
            counts = await self._attempts()
            counts.subtract(before)
            if counts.total() >= ENOUGH:
                return sorted(
                    [*[0.0] * (workers - len(counts)), *(n * workers / counts.total() for n in counts.values())]
                )

    async def _attempts(self) -> Counter[str]:
        async with self._client.get(f"{self._url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        samples = [
            each for family in families for each in family.samples if each.name == "bough_gateway_attempts_total"
        ]
        return Counter({each.labels["worker"]: int(each.value) for each in samples})


@pytest.mark.slow
def test_short_prompts_are_spread_evenly_and_a_worker_that_joins_gets_its_share(tiny_model: Path) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(running(str(tiny_model), *ENGINE, ready=False)) for _ in range(3)]
        for engine in engines:
            engine.wait_ready()
        urls = [engine.url for engine in engines]
        flags = ("--policy", "cost", "--health-check-interval-secs", "1", "--worker-urls", *urls[:2])
        gateway = stack.enter_context(running_gateway(*flags))
        gateway.wait_for(2)

        async def play() -> None:
            async with aiohttp.ClientSession() as client:
                load = Load(gateway, client)
                async with load.running():
                    assert (await load.shares(2))[-1] <= EVEN
                    async with client.post(f"{gateway.url}/workers", json={"url": urls[2]}) as response:
                        assert response.status == 202
                    await asyncio.to_thread(gateway.wait_for, 3)
                    shares = await load.shares(3)
                    assert shares[-1] <= EVEN and shares[0] >= 2 - EVEN, shares

        asyncio.run(play())
