"""The cheapest possible client: it shares the cores with the server that it measures, so it does next to nothing.

Each connection sends the same prepared request again and again. Answers are not parsed: a stream ends with HTTP's last
chunk, any other answer with the length it declared; events are counted as they pass.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from bough.core.errors import BoughError

LAST_CHUNK = b"0\r\n\r\n"
EVENT = b"data: {"


class EdgeError(BoughError):
    """The server gave an answer that makes the measurement worthless."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, and whether its answer is a stream."""

    path: str
    body: dict[str, object]
    stream: bool

    def encode(self, host: str) -> bytes:
        body = msgspec.json.encode(self.body)
        head = f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Tally:
    """What a client process has seen."""

    answers: int = 0
    events: int = 0
    received_bytes: int = 0
    cpu_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)  # from sending a request to the last byte of its answer


class EdgeConnection(asyncio.Protocol):
    """One closed loop: the next request leaves when the last answer is complete, until `until`."""

    def __init__(self, raw: bytes, stream: bool, until: float, tally: Tally) -> None:
        self._raw = raw
        self._stream = stream
        self._until = until
        self._tally = tally
        self._answer = b""  # of a stream only its last bytes
        self._fresh = True
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._fresh:
            self._fresh = False
            if not data.startswith(b"HTTP/1.1 200"):
                self._end(EdgeError(f"The server answered {data[:300].decode(errors='replace')!r}."))
                return
        self._tally.received_bytes += len(data)
        if self._stream:
            self._tally.events += data.count(EVENT)
            self._answer = (self._answer + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
            complete = self._answer == LAST_CHUNK
        else:
            self._answer += data
            complete = _is_complete(self._answer)
        if complete:
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(EdgeError("The server closed a connection."))

    def _next(self) -> None:
        self._tally.answers += 1
        self._tally.latencies_s.append(time.perf_counter() - self._sent_s)
        self._answer, self._fresh = b"", True
        if time.monotonic() < self._until:
            self._send()
        else:
            self._end(None)

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._raw)

    def _end(self, error: EdgeError | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
        self._transport.close()


def _is_complete(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    length = next(
        (line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), b"0"
    )
    return len(body) >= int(length)


def send_for(url: str, request: Request, connections: int, seconds: float) -> Tally:
    """Keeps `connections` busy for so long, and waits for the last answers."""

    async def run() -> Tally:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        host, port = address.hostname, address.port
        raw = request.encode(address.netloc)
        tally, loop, until = Tally(), asyncio.get_running_loop(), time.monotonic() + seconds
        opened = [
            await loop.create_connection(lambda: EdgeConnection(raw, request.stream, until, tally), host, port)
            for _ in range(connections)
        ]
        await asyncio.gather(*(connection.done for _, connection in opened))
        return tally

    began = time.process_time()
    tally = uvloop.run(run())
    tally.cpu_s = time.process_time() - began
    return tally
