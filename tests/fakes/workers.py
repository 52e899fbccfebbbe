"""Workers for the gateway's tests: small HTTP servers on the test's own event loop that can also misbehave.

Their "model" is a hash: the next token follows from the prompt and the tokens so far, so every worker says the same and
a stream that was resumed wrongly shows. They speak the `X-Bough-Resume` protocol as an engine does, unless told not to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


def next_token(prompt: str, output: list[int]) -> int:
    return int.from_bytes(hashlib.sha256(f"{prompt}|{output}".encode()).digest()[:2], "big")


def tokens_of(prompt: str, count: int) -> list[int]:
    output: list[int] = []
    while len(output) < count:
        output.append(next_token(prompt, output))
    return output


def text_of(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


@dataclass
class FakeWorker:
    """One worker. `mode` may change while it runs: ok, garbage, black_hole, error, plain_error, busy, slow."""

    model: str = "tiny"
    mode: str = "ok"
    resumes: bool = True
    pause_s: float = 0.0  # between two tokens
    api_key: str | None = None
    die_after: int | None = None  # events of a stream after which the connection breaks
    health: int = 200
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    aborted: int = 0
    running: int = 0
    most_running: int = 0
    url: str = ""

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def stop(self) -> None:
        """As a process that is killed: its port refuses and its connections break."""
        server = self._runner.server
        for connection in list(server.connections if server is not None else ()):  # none, if it was stopped before
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    # ---- answers

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if self.mode == "black_hole":
            await asyncio.sleep(3600)
        allowed = path == "/health" or request.headers.get("Authorization") == f"Bearer {self.api_key}"
        if self.api_key is not None and not allowed:
            return web.Response(status=401, text="who are you?")
        match path:
            case "/health":
                return web.Response(status=self.health)
            case "/v1/models":
                return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})
            case "/server_info":
                return web.json_response({"model_path": self.model, "max_running_requests": 8, "version": "fake"})
            case "/v1/loads":
                return web.json_response({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.requests.append((path, {k.lower(): v for k, v in request.headers.items()}, body))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._work(request, path, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _work(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        match self.mode:
            case "garbage":
                return web.Response(text="\x00\x01 no JSON at all", content_type="application/json")
            case "error":
                return web.json_response({"error": {"message": "boom"}}, status=500)
            case "plain_error":
                return web.Response(status=500, text="out of cheese")
            case "bad_request":
                return web.Response(status=400, text="that is no request")
            case "busy":
                return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "1"})
            case "slow":
                await asyncio.sleep(3600)
        if path == "/v1/responses" and request.method == "POST":
            return web.json_response({"id": f"resp_{self.port}_{len(self.requests)}", "object": "response"})
        if path.startswith("/v1/responses/"):
            mine = path.split("/")[3].startswith(f"resp_{self.port}_")
            return web.json_response({"id": path.split("/")[3], "port": self.port}, status=200 if mine else 404)
        if path not in ("/v1/completions", "/v1/chat/completions", "/generate", "/v1/messages"):
            return web.json_response({"path": path, "query": request.rel_url.raw_query_string, "body": body})
        if body.get("stream"):
            return await self._stream(request, path, body)
        await asyncio.sleep(self.pause_s)
        tokens = tokens_of(_prompt(body), body.get("max_tokens", 4))
        usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 5}}
        choice = {"index": 0, "text": text_of(tokens), "message": {"content": text_of(tokens)}}
        return web.json_response({"id": "cmpl-1", "port": self.port, "choices": [choice], "usage": usage})

    async def break_off(self, request: web.Request, response: web.StreamResponse | None = None) -> None:
        assert request.transport is not None
        request.transport.abort()

    async def _stream(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        announces = self.resumes and request.headers.get("X-Bough-Resume") == "1"
        resume = body.get("resume") or {}
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        output: list[int] = list(resume.get("output_ids", ()))
        identity = resume.get("id") or f"cmpl-{self.port}-{len(self.requests)}"
        created = resume.get("created") or 1000 + self.port
        sent = 0
        first = f": seed {body.get('seed', 7)}\n" if announces else ""
        count = body.get("max_tokens", 4)
        while len(output) < count:
            await asyncio.sleep(self.pause_s)
            if self.die_after is not None and sent >= self.die_after:
                await self.break_off(request, response)
                return response
            output.append(next_token(_prompt(body), output))
            ended = len(output) == count
            group = ": events 2\n" if ended else ""
            comment = f"{first}{group}: ids {output[-1]}\n" if announces else ""
            first = ""
            event = {"id": identity, "created": created, "text": text_of(output[-1:])}
            last = "data: [DONE]\n\n" if ended else ""
            await response.write(f"{comment}data: {json.dumps(event)}\n\n{last}".encode())
            sent += 1
        await response.write_eof()
        return response


def _prompt(body: dict[str, Any]) -> str:
    return str(body.get("prompt") or body.get("text") or body.get("messages"))


@contextlib.asynccontextmanager
async def workers(*fakes: FakeWorker) -> AsyncIterator[list[FakeWorker]]:
    """Starts them, and ends them whatever happens."""
    try:
        for fake in fakes:
            await fake.start()
        yield list(fakes)
    finally:
        for fake in fakes:
            await fake.stop()
