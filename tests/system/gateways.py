"""A gateway as a user starts it, on a free port; always ended, and its engines with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil

START_S = 300.0
PATIENCE_S = 120.0


class GatewayProcess:
    """One `bough gateway`; standard error goes to a file, so that nobody has to read it."""

    def __init__(self, folder: Path, *flags: str, variables: Mapping[str, str] = {}) -> None:
        self.errors = folder / "stderr"
        words = [sys.executable, "-m", "bough.cli.main", "gateway", "--port", "0", *flags]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BOUGH_GATEWAY_")}
        environ |= variables
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"served at (\S+)", self.line)
        assert found, f"the gateway did not start: {self.line}{self.log()}"
        self.url = found[1]

    def log(self) -> str:
        return self.errors.read_text(errors="replace")

    def workers(self, headers: Mapping[str, str] = {}) -> list[dict[str, Any]]:
        reply = httpx.get(f"{self.url}/workers", headers=headers, timeout=PATIENCE_S)
        workers: list[dict[str, Any]] = reply.json()["workers"]
        return workers

    def wait_for(self, count: int, headers: Mapping[str, str] = {}) -> None:
        """Until so many workers are in rotation."""
        deadline = time.monotonic() + START_S
        while sum(worker["is_healthy"] for worker in self.workers(headers)) < count:
            assert time.monotonic() < deadline, f"never {count} workers in rotation: {self.log()}"
            assert self.process.poll() is None, self.log()
            time.sleep(0.2)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def running_gateway(*flags: str, variables: Mapping[str, str] = {}) -> Iterator[GatewayProcess]:
    with tempfile.TemporaryDirectory() as folder:
        gateway = GatewayProcess(Path(folder), *flags, variables=variables)
        try:
            yield gateway
        finally:
            gateway.end()


async def stream_text(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    """The text of one streamed completion; anything but a whole, ordinary stream is an error."""
    async with client.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        raw = (await response.read()).decode()
    blocks = [block for block in raw.split("\n\n") if block and not block.startswith(": ")]
    assert blocks[-1] == "data: [DONE]", raw[-500:]
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
    assert all("error" not in chunk for chunk in chunks), raw[-500:]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


async def greedy_texts(url: str, prompts: list[str], max_tokens: int) -> list[str]:
    """What each prompt gives in an undisturbed run."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        bodies = [greedy(prompt, max_tokens) for prompt in prompts]
        return await asyncio.gather(*(stream_text(client, url, body) for body in bodies))


def greedy(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
