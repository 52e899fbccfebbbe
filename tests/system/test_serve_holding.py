"""What a server holds, and what it costs when nobody asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.system.serving import PATIENCE_S, TINY, Server, running, until_idle

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}, "stream": True}


async def stream(host: str, port: int, everybody: asyncio.Barrier) -> bytes:
    """Connects, waits until everybody has, and reads its stream to the end."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        await everybody.wait()
        body = json.dumps(BODY).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return await reader.read()
    finally:
        writer.close()


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with running(str(tiny_model), *TINY) as started:
        yield started


@pytest.mark.slow
def test_a_thousand_streaming_connections_are_held(server: Server) -> None:
    async def go(url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        everybody = asyncio.Barrier(1000)
        streams = [asyncio.ensure_future(stream(address.hostname, address.port, everybody)) for _ in range(1000)]
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            assert (await http.get("/health")).status_code == 200
        for answer in await asyncio.gather(*streams):
            assert answer.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in answer

    asyncio.run(go(server.url))


@pytest.mark.slow
def test_an_idle_server_burns_no_cpu(server: Server) -> None:
    httpx.post(f"{server.url}/generate", json=BODY | {"stream": False}, timeout=PATIENCE_S)
    until_idle([psutil.Process(server.process.pid), *server.children()])
