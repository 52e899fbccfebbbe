"""A gateway process that runs out of descriptors: connections wait for it, and every request is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from tests.fakes.workers import FakeWorker, text_of, tokens_of, workers
from tests.system.gateways import PATIENCE_S, GatewayProcess, running_gateway

CONNECTIONS = 100


@contextlib.asynccontextmanager
async def gateway_of(worker: FakeWorker) -> AsyncIterator[GatewayProcess]:
    async with workers(worker):
        with running_gateway("--worker-urls", worker.url) as gateway:
            await asyncio.to_thread(gateway.wait_for, 1)
            yield gateway


@contextlib.contextmanager
def limited(gateway: GatewayProcess, spare: int) -> Iterator[None]:
    """No more than so many further descriptors for the gateway's process."""
    process = psutil.Process(gateway.process.pid)
    soft, hard = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + spare, hard))
    try:
        yield
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass
class Connection:
    """A client's, which it would use again: it is never the client that closes it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def to(cls, gateway: GatewayProcess) -> Connection:
        host, port = gateway.url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self, prompt: str) -> tuple[int, Any]:
        body = json.dumps({"prompt": prompt, "max_tokens": 3}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        async with asyncio.timeout(PATIENCE_S):
            self.writer.write(head.encode() + body)
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
            length = next(int(line.removeprefix("content-length:")) for line in lines if "content-length" in line)
            return int(lines[0].split()[1]), json.loads(await self.reader.readexactly(length))


async def all_right(connections: list[Connection]) -> None:
    answers = await asyncio.gather(*(each.ask(f"p{number}") for number, each in enumerate(connections)))
    for number, (status, answer) in enumerate(answers):
        assert status == 200, answer
        assert answer["choices"][0]["text"] == text_of(tokens_of(f"p{number}", 3))


def test_more_connections_than_descriptors_are_all_answered() -> None:
    async def story() -> None:
        async with gateway_of(FakeWorker(pause_s=0.02)) as gateway:
            with limited(gateway, spare=24):
                await all_right([await Connection.to(gateway) for _ in range(CONNECTIONS)])

    asyncio.run(story())


def test_connections_wait_while_there_is_no_descriptor_at_all() -> None:
    async def story() -> None:
        async with gateway_of(FakeWorker()) as gateway:
            with limited(gateway, spare=0):
                connections = [await Connection.to(gateway) for _ in range(CONNECTIONS)]
                asked = asyncio.create_task(all_right(connections))
                await asyncio.sleep(1.0)  # for anything that the gateway might do to them
            await asked

    asyncio.run(story())


def test_a_request_without_a_descriptor_for_its_worker_gets_a_503_and_the_worker_no_blame() -> None:
    async def story() -> None:
        worker = FakeWorker()
        async with gateway_of(worker) as gateway:
            connections = [await Connection.to(gateway) for _ in range(12)]
            for number, each in enumerate(connections):  # one after the other: the gateway keeps few connections
                await each.ask(f"p{number}")
            worker.mode = "slow"
            with limited(gateway, spare=0):
                asked = {asyncio.create_task(each.ask("p")) for each in connections}
                done, slow = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                status, answer = done.pop().result()
                assert status == 503 and "ulimit -n" in answer["error"]["message"], answer
            for task in slow:
                task.cancel()
            worker.mode = "ok"
            await all_right([await Connection.to(gateway)])
            (state,) = await asyncio.to_thread(gateway.workers)
            assert state["is_healthy"] and state["breaker"] == "closed", state

    asyncio.run(story())
