"""What a request and a token cost several gateways, of this checkout and of others, on a machine that is also used
otherwise.

`bough bench gateway --overhead --against DIR ...` runs it. The gateways take turns before one worker that writes
prepared bytes, together with a program that only copies bytes: what all pay for that is the kernel's share. The figure
of each is the lower quartile of its turns, as CPU time from `/proc/PID/schedstat`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import uvloop

from tests.bench.edge_client import EdgeConnection, EdgeError, Request, Tally
from tests.bench.gateway_processes import RunningGateway, gateway_process, program_process

MODEL = "prepared"
PROMPT = "The quick brown fox jumps over the lazy dog, and then it rests for a while in the shade of an old tree. " * 2
POLICY = "cost"
TURN_S = 0.1  # of requests; a turn of streams is one stream on each connection
EVENT_S = 0.02  # between two events of a stream: so far apart that events do not queue
COPYING = "only copying"
WORKERS = 4  # that the gateways see; one program is all of them


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and what it is counted in."""

    name: str
    unit: str
    body: dict[str, object]
    tokens: int = 1


def loads(stream_len: int) -> list[Load]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": stream_len}
    return [
        Load("requests", "request", {**body, "stream": False}),
        Load("streams, foreign worker", "token", {**body, "stream": True, "user": "foreign"}, stream_len),
        Load("streams that can be resumed", "token", {**body, "stream": True}, stream_len),
    ]


def measure_turns(trees: Sequence[str], connections: int, seconds: float, stream_len: int) -> Iterator[dict[str, Any]]:
    """One result per load; `seconds` is how long each gateway has."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        worker = enter(program_process(["tests.bench.gateway_turns", "worker"]))
        urls = [f"{worker.url}/{number}" for number in range(WORKERS)]
        found = {COPYING: enter(program_process(["tests.bench.gateway_turns", "copy", worker.url]))}
        for tree in trees:
            found[tree] = enter(gateway_process(urls, POLICY, tree=Path(tree).resolve()))
        found["this checkout"] = enter(gateway_process(urls, POLICY))
        for load in loads(stream_len):
            yield uvloop.run(_take_turns(load, found, connections, seconds))


async def _take_turns(
    load: Load, gateways: dict[str, RunningGateway], connections: int, seconds: float
) -> dict[str, Any]:
    streams = load.tokens > 1
    turn_s = 0.0 if streams else TURN_S
    clients = {name: await Client.open(gateway.url, load, connections) for name, gateway in gateways.items()}
    costs: dict[str, list[float]] = {name: [] for name in gateways}
    for client in clients.values():
        await client.turn(turn_s)  # warm-up
    for _ in range(max(2, round(seconds / (load.tokens * EVENT_S if streams else TURN_S)))):
        for name, client in clients.items():
            before_ns = _cpu_ns(gateways[name].process_id)
            answers = await client.turn(turn_s)
            costs[name].append((_cpu_ns(gateways[name].process_id) - before_ns) / 1000 / (answers * load.tokens))
    for client in clients.values():
        client.close()
    figures = {name: float(np.quantile(each, 0.25)) for name, each in costs.items()}
    first = next(name for name in figures if name != COPYING)
    shares = {name: figure / figures[first] for name, figure in figures.items()}
    return {"run": load.name, "connections": connections, f"cpu_us_per_{load.unit}": figures, "times_the_first": shares}


def as_text(result: dict[str, Any]) -> str:
    (figures,) = (value for name, value in result.items() if name.startswith("cpu_us_per_"))
    shares = result["times_the_first"]
    unit = next(name for name in result if name.startswith("cpu_us_per_")).rpartition("_")[2]
    lines = [f"{result['connections']} {result['run']} at once:"]
    lines += [f"  {name:<24} {us:>8.1f} µs per {unit}  {shares[name]:>6.3f}" for name, us in figures.items()]
    return "\n".join(lines)


def _cpu_ns(process_id: int) -> int:
    """Of the main thread, which does all of the work."""
    return int(Path(f"/proc/{process_id}/schedstat").read_text().split()[0])


class _Connection(EdgeConnection):
    """Stays open between turns."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self, until: float) -> asyncio.Future[None]:
        self.done, self._until = asyncio.get_running_loop().create_future(), until
        self._send()
        return self.done

    def _end(self, error: EdgeError | None) -> None:
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)


class Client:
    """The connections to one gateway."""

    def __init__(self, connections: list[_Connection], tally: Tally) -> None:
        self._connections, self._tally = connections, tally

    @classmethod
    async def open(cls, url: str, load: Load, connections: int) -> Client:
        address, loop, tally = urlsplit(url), asyncio.get_running_loop(), Tally()
        request = Request("/v1/completions", load.body, load.tokens > 1)
        raw = request.encode(address.netloc)
        assert address.hostname is not None and address.port is not None
        made = [
            (
                await loop.create_connection(
                    lambda: _Connection(raw, request.stream, 0.0, tally), address.hostname, address.port
                )
            )[1]
            for _ in range(connections)
        ]
        return cls(made, tally)

    async def turn(self, seconds: float) -> int:
        """How many answers came. Streams begin one after the other, so that their events do not come together."""
        before, loop = self._tally.answers, asyncio.get_running_loop()
        until, waiting = loop.time() + seconds, list[asyncio.Future[None]]()
        for connection in self._connections:
            waiting.append(connection.begin(until))
            if not seconds:
                await asyncio.sleep(EVENT_S / len(self._connections))
        await asyncio.gather(*waiting)
        return self._tally.answers - before

    def close(self) -> None:
        for connection in self._connections:
            connection._transport.close()


# ---- what stands behind the gateways


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _page(content: object, kind: bytes = b"application/json") -> bytes:
    body = json.dumps(content).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)


PAGES = {
    b"health": _page({"status": "ok"}),
    b"v1/models": _page({"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
    b"server_info": _page({"model_path": MODEL, "version": "prepared"}),
    b"v1/loads": _page({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "prefill_tokens_per_s": 4000.0}]}),
}
CHUNK = {"id": "cmpl-0", "object": "text_completion", "created": 1700000000, "model": MODEL}
CHUNK |= {"choices": [{"index": 0, "text": " tree", "logprobs": None, "finish_reason": None}]}
USAGE = {"prompt_tokens": 50, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
WHOLE = _page({**CHUNK, "usage": USAGE})
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"data: %b\n\n" % json.dumps(CHUNK).encode()
OWN_FIRST, OWN_EVENT = _chunk(b": seed 7\n: ids 17\n" + EVENT), _chunk(b": ids 17\n" + EVENT)
FOREIGN_EVENT = _chunk(EVENT)
LAST = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Prepared(asyncio.Protocol):
    """A worker that writes prepared bytes."""

    def __init__(self) -> None:
        self._come = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._loop = cast(asyncio.Transport, transport), asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._come += data
        head, found, body = self._come.partition(b"\r\n\r\n")
        if not found:
            return
        lowered = head.lower()
        length = int(lowered.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        self._come = b""
        path = head.split(b" ")[1].lstrip(b"/0123456789")
        if path in PAGES:
            self._transport.write(PAGES[path])
        elif b'"stream":true' not in body:
            self._transport.write(WHOLE)
        else:
            own = b"x-bough-resume" in lowered and b'"foreign"' not in body
            left = int(body.partition(b'"max_tokens":')[2].split(b",")[0])
            self._transport.write(STREAM)
            self._write(OWN_FIRST if own else FOREIGN_EVENT, OWN_EVENT if own else FOREIGN_EVENT, left)

    def _write(self, event: bytes, later: bytes, left: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(event if left > 1 else event + LAST)
        if left > 1:
            self._loop.call_later(EVENT_S, self._write, later, later, left - 1)


class Copier(asyncio.Protocol):
    """One direction of a connection; `other` is where it writes."""

    def __init__(self, worker: str | None = None) -> None:
        self._worker, self._early = worker, b""
        self.other: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._worker is not None:
            self._opening = asyncio.get_running_loop().create_task(self._open(urlsplit(self._worker)))

    async def _open(self, address: Any) -> None:
        back = Copier()
        back.other = self.transport
        loop = asyncio.get_running_loop()
        self.other = (await loop.create_connection(lambda: back, address.hostname, address.port))[0]
        self.other.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


async def serve(words: Sequence[str]) -> None:
    loop = asyncio.get_running_loop()
    made = Prepared if words[0] == "worker" else lambda: Copier(words[1])
    server = await loop.create_server(made, "127.0.0.1", 0)
    print("served at http://{}:{}".format(*server.sockets[0].getsockname()), flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)  # until the process that started it has ended


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:]))
