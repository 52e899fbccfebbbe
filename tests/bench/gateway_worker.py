"""A stand-in engine over HTTP, for the gateway's benchmark and tests: real sockets and cache events, modelled compute.

Run as `python -m tests.bench.gateway_worker`, with a `WorkerSpec` as JSON on standard input, which stays open: its end
ends the worker. It answers what a gateway asks of a worker (health, models, loads, tokenize) and `/v1/completions`,
and keeps to the costs of `EngineModel` by sleeping. HTTP is done by hand on httptools, so that the stand-in costs as
little as possible of the cores that it shares with the gateway under measurement.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from typing import Any, cast

import httptools
import msgspec
import uvloop

from bough.launch.kv_events import KVEventPublisher
from bough.memory.tree.events import KVEvent, parse_config
from bough.version import __version__
from tests.bench.gateway_simulation import TOKEN_CHARS, Costs, EngineModel, answer_text, tokenize

MODEL = "stand-in"


class WorkerSpec(msgspec.Struct, frozen=True):
    """Everything a stand-in is told."""

    name: str
    costs: Costs
    kv_events_config: str | None = None
    event_tokens: int = 1  # tokens in an event of a stream


class CompletionBody(msgspec.Struct):
    """What of a request is used."""

    prompt: str
    max_tokens: int = 16
    stream: bool = False


class StandIn:
    """The modelled engine: one prefill at a time, answers beside it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._device = asyncio.Lock()
        self._waiting = 0
        self._running = 0
        self._speed: float | None = None  # as an engine reports it: nothing before the first prompt is computed
        self._publisher: KVEventPublisher | None = None
        if spec.kv_events_config is not None:
            self._publisher = KVEventPublisher(parse_config(spec.kv_events_config))
        self.model = EngineModel(spec.costs, self._add_event if self._publisher is not None else None)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _add_event(self, event: KVEvent) -> None:
        assert self._publisher is not None
        self._publisher.add(event)

    def _publish(self) -> None:
        if self._publisher is not None:
            self._publisher.flush()

    def describe(self, path: str) -> dict[str, Any] | None:
        """The answers to GET."""
        counts = {"num_running_reqs": self._running, "num_waiting_reqs": self._waiting}
        loads = {**counts, "prefill_tokens_per_s": self._speed}
        pages: dict[str, dict[str, Any]] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]},
            "/model_info": {"model_path": MODEL, "is_generation": True},
            "/server_info": {
                "model_path": MODEL,
                "version": __version__,
                "tp_size": 1,
                "dp_size": 1,
                "kv_events_config": self.spec.kv_events_config,
            },
            "/v1/loads": {"loads": [loads]},
        }
        return pages.get(path)

    async def complete(self, body: CompletionBody, exchange: Exchange) -> None:
        """Answers a request, in the time that it would take."""
        answer = answer_text(zlib.crc32(body.prompt.encode()), body.max_tokens)
        prompt = tokenize(body.prompt)
        self._waiting += 1
        async with self._device:
            self._waiting -= 1
            self._running += 1
            running = self.model.begin(prompt)
            self._publish()
            await _pass(self.model.prefill_s(running))
            self._speed = self.spec.costs.tokens_per_s
        usage = {
            "prompt_tokens": running.prompt_tokens,
            "completion_tokens": body.max_tokens,
            "prompt_tokens_details": {"cached_tokens": running.cached_tokens},
        }
        try:
            if body.stream:
                await self._stream(exchange, answer, body.max_tokens, usage)
            else:
                await _pass(self.model.decode_s(body.max_tokens))
                exchange.send_json(200, self._chunk(answer, "length", usage))
        finally:
            self._running -= 1
            self.model.finish(running, tokenize(body.prompt + answer))
            self._publish()

    async def _stream(self, exchange: Exchange, answer: str, tokens: int, usage: dict[str, Any]) -> None:
        exchange.begin_stream()
        for start in range(0, tokens, self.spec.event_tokens):
            end = min(tokens, start + self.spec.event_tokens)
            await _pass(self.model.decode_s(end - start))
            text = answer[TOKEN_CHARS * start : TOKEN_CHARS * end]
            exchange.send_event(self._chunk(text, *(("length", usage) if end == tokens else (None, None))))
        exchange.end_stream()

    def _chunk(self, text: str, finish: str | None, usage: dict[str, Any] | None) -> dict[str, Any]:
        """OpenAI's form; the fingerprint says which worker has answered."""
        choice = {"index": 0, "text": text, "finish_reason": finish}
        chunk = {"id": "cmpl-0", "object": "text_completion", "model": MODEL, "choices": [choice]}
        return {**chunk, "system_fingerprint": self.spec.name, **({"usage": usage} if usage else {})}


async def _pass(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


class Exchange(asyncio.Protocol):
    """One connection: requests one after the other. The methods that begin with `on_` are called by the parser."""

    def __init__(self, engine: StandIn) -> None:
        self._engine = engine
        self._path, self._body = "", bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url.split(b"?")[0].decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = bytes(self._body), bytearray()
        if self._path == "/v1/completions":
            asked = msgspec.json.decode(body, type=CompletionBody)
            self._task = asyncio.get_running_loop().create_task(self._engine.complete(asked, self))
        elif self._path == "/tokenize":
            tokens = tokenize(msgspec.json.decode(body)["prompt"]).tolist()
            self.send_json(200, {"tokens": tokens, "count": len(tokens)})
        elif (page := self._engine.describe(self._path)) is not None:
            self.send_json(200, page)
        else:
            self.send_json(404, {"error": {"message": f"There is no {self._path} here."}})

    def send_json(self, status: int, content: dict[str, Any]) -> None:
        body = msgspec.json.encode(content)
        reason = "OK" if status == 200 else "Not Found"
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def begin_stream(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(head)

    def send_event(self, content: dict[str, Any]) -> None:
        self._send_chunk(b"data: " + msgspec.json.encode(content) + b"\n\n")

    def end_stream(self) -> None:
        self._send_chunk(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _send_chunk(self, data: bytes) -> None:
        self._transport.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def serve(spec: WorkerSpec) -> None:
    loop = asyncio.get_running_loop()
    engine = StandIn(spec)
    server = await loop.create_server(lambda: Exchange(engine), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"served at http://{host}:{port}", flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)  # until the process that started it has ended
    server.close()
    engine.close()


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
    uvloop.run(serve(spec))


if __name__ == "__main__":
    main()
