"""A stream whose engine loses a process in its middle goes on elsewhere, in every protocol, as if nothing had been."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import psutil
import pytest

from tests.system.gateways import GatewayProcess, running_gateway
from tests.system.serving import until

TOKENS = 60
ENGINE = ("--max-total-tokens", "8000", "--cpu-threads", "1", "--log-level", "warning")
GREEDY = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "The history of the city of Paris begins", **GREEDY}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me a story."}], **GREEDY}),
    "native": (
        "/generate",
        {
            "text": "Rivers of the world:",
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        },
    ),
    "anthropic": (
        "/v1/messages",
        {
            "model": "SmolLM2-135M-Instruct",
            "messages": [{"role": "user", "content": "Tell me a joke."}],
            "max_tokens": TOKENS,
            "temperature": 0,
        },
    ),
    "seeded": ("/v1/completions", {"prompt": "Dice rolls: ", **GREEDY, "temperature": 1.0, "seed": 5}),
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    flags = ("--launch", "2", "--policy", "round_robin", "--health-check-interval-secs", "1")
    with running_gateway(*flags, "--", *ENGINE) as started:
        yield started


async def stream(url: str, path: str, body: dict[str, Any], in_the_middle: Callable[[], Awaitable[None]] | None) -> str:
    raw = b""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout) as client,
        client.post(url + path, json={**body, "stream": True}) as response,
    ):
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            raw += chunk
            if in_the_middle is not None and raw.count(b"data:") > 10:
                await in_the_middle()
                in_the_middle = None
    assert in_the_middle is None, "the stream was over too soon"
    return text_of(raw.decode())


def text_of(raw: str) -> str:
    """What a client of any protocol has read in the end."""
    text = ""
    for line in raw.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        if "text" in event:
            text = event["text"]
        elif event.get("type") == "content_block_delta":
            text += event["delta"]["text"]
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


VICTIMS = ("the whole engine", "scheduler")
# Every protocol once and every victim; what is left of their product takes a restart of an engine each.
OTHERS = [pytest.param(case, VICTIMS[1 - turn % 2], marks=pytest.mark.long) for turn, case in enumerate(CASES)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "victim"), [*((c, VICTIMS[turn % 2]) for turn, c in enumerate(CASES)), *OTHERS])
def test_a_killed_process_shows_in_no_stream(gateway: GatewayProcess, case: str, victim: str) -> None:
    path, body = CASES[case]
    gateway.wait_for(2)
    killed: set[int] = set()  # engines

    async def kill() -> None:
        workers = await asyncio.to_thread(gateway.workers)
        process = psutil.Process(max(workers, key=lambda worker: worker["load"])["pid"])
        killed.add(process.pid)
        if victim == "scheduler":
            children = process.children(recursive=True)
            process = next(child for child in children if "bough::scheduler" in " ".join(child.cmdline()))
        process.kill()

    async def both() -> tuple[str, str]:
        async def nothing() -> None:
            return

        return await stream(gateway.url, path, body, nothing), await stream(gateway.url, path, body, kill)

    undisturbed, disturbed = asyncio.run(both())
    assert disturbed == undisturbed and len(undisturbed) > 20
    # The gateway may hear of the death only now; the next case must not take the dead engine for a living one.
    until(lambda: not killed & {worker["pid"] for worker in gateway.workers()}, "another engine in its place")
