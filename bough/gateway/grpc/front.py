"""The gRPC server: three methods, each a request to the gateway's HTTP application in the same process, so that keys,
limits, routing, retries and failover are those of HTTP.

A call that is cancelled or times out is a client that has disconnected: the worker aborts its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import unquote

import grpc
import grpc.aio
from starlette.types import ASGIApp, Message

from bough.core.errors import RequestError, SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway.grpc.messages import (
    CODES,
    SERVICE,
    GenerateReply,
    GenerateRequest,
    HealthReply,
    HealthRequest,
    completion_body,
    error_text,
    read_completion,
    reply_of,
)
from bough.server.http import SHUTDOWN_GRACE_S

MIB = 1 << 20
LARGEST_MESSAGE_MB = 4  # gRPC's own default: a message is decoded in one go, on the event loop
DROPPED = ("content-type", "content-length", "te", "host", "connection")  # gRPC's own, and not the request's
Headers = Sequence[tuple[bytes, bytes]]
MOST_PIECES = 16  # that wait for their reader: a slow one slows the application down


async def serve_grpc(app: ASGIApp, settings: GatewaySettings) -> tuple[grpc.aio.Server, int]:
    """Serves the gateway's HTTP application over gRPC; returns the server and its port. Processes may share a port."""
    host, port, certificate = settings.host, settings.grpc_port, settings.ssl_certfile
    largest = min(settings.max_body_mb, LARGEST_MESSAGE_MB) * MIB
    options = [("grpc.max_receive_message_length", largest), ("grpc.so_reuseport", 1)]
    server = grpc.aio.server(options=options)
    front = GrpcFront(app)
    handlers = {
        "Generate": _unary(front.generate, GenerateRequest),
        "GenerateStream": grpc.unary_stream_rpc_method_handler(
            front.generate_stream, GenerateRequest.FromString, GenerateReply.SerializeToString
        ),
        "Health": _unary(front.health, HealthRequest),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if certificate is None:
            bound = server.add_insecure_port(address)
        else:  # both may be in one file, as with HTTPS
            pair = (Path(settings.ssl_keyfile or certificate).read_bytes(), Path(certificate).read_bytes())
            bound = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except (RuntimeError, OSError) as error:
        raise SettingsError(f"--grpc-port: cannot listen on {address}: {error}.") from None
    await server.start()
    return server, bound


def _unary(method: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(method, request.FromString, lambda reply: reply.SerializeToString())


class GrpcFront:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def generate(self, request: Any, context: Any) -> Any:
        async with await self._complete(request, context, stream=False) as exchange:
            body = await exchange.whole()
            if exchange.status != 200:
                await _refuse(context, exchange, body)
            return reply_of(read_completion(body))

    async def generate_stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with await self._complete(request, context, stream=True) as exchange:
            if exchange.status != 200:
                await _refuse(context, exchange, await exchange.whole())
            async for data in events_of(exchange.pieces()):
                completion = read_completion(data)
                if completion.error is not None:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, error_text(data))
                yield reply_of(completion)

    async def health(self, request: Any, context: Any) -> Any:
        async with Exchange(self._app, "GET", "/readiness", [], b"", _peer_of(context)) as exchange:
            body = await exchange.whole()
            if exchange.status == 200:
                return HealthReply(status=HealthReply.SERVING)
            return HealthReply(status=HealthReply.NOT_SERVING, reason=error_text(body))

    async def _complete(self, request: Any, context: Any, *, stream: bool) -> Exchange:
        try:
            body = completion_body(request, stream)
        except RequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        headers = _headers_of(context)
        return Exchange(self._app, "POST", "/v1/completions", headers, body, _peer_of(context))


class Exchange:
    """One request to an ASGI application in the same process: its status and its bytes as they come. An async context:
    leaving it before the end disconnects the client."""

    def __init__(
        self, app: ASGIApp, method: str, path: str, headers: Headers, body: bytes, client: tuple[str, int] | None
    ) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._app = app
        self._body: bytes | None = body
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "2",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*headers, (b"content-length", str(len(body)).encode())],
            "client": client,
            "server": None,
        }
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(MOST_PIECES)  # None: the application has ended
        self._left = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        try:
            start = await self._next()
        except BaseException:  # above all a call that was cancelled or is out of time
            await self.__aexit__()
            raise
        self.status = start["status"]
        self.headers = dict(start.get("headers", ()))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._left.set()
        while not self._messages.empty():
            self._messages.get_nowait()  # a sender that waits for room can end
        await asyncio.wait({self._task}, timeout=SHUTDOWN_GRACE_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def pieces(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._next()
            if message.get("body"):
                yield message["body"]
            more = message.get("more_body", False)

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def _next(self) -> Message:
        """The application's next message. Raises what has ended it."""
        message = await self._messages.get()
        if message is None:
            await self._task
            raise RuntimeError("The application ended before its response did.")
        return message

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            await self._send(None)

    async def _send(self, message: Message | None) -> None:
        if not self._left.is_set():
            await self._messages.put(message)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}


async def events_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, without the end mark."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield data


async def _refuse(context: Any, exchange: Exchange, body: bytes) -> NoReturn:
    code = getattr(grpc.StatusCode, CODES.get(exchange.status, "INTERNAL"))
    after = exchange.headers.get(b"retry-after")
    await context.abort(code, error_text(body), () if after is None else (("retry-after", after.decode()),))
    raise AssertionError  # `abort` has ended the call


def _headers_of(context: Any) -> Headers:
    """The metadata as HTTP headers, without gRPC's own and binary values."""
    headers = [(b"content-type", b"application/json")]
    for name, value in context.invocation_metadata():
        if isinstance(value, str) and name not in DROPPED and not name.startswith((":", "grpc-")):
            headers.append((name.lower().encode(), value.encode("latin-1", "replace")))
    return headers


def _peer_of(context: Any) -> tuple[str, int] | None:
    """The client's address, from gRPC's form such as `ipv4:127.0.0.1:50412`."""
    family, _, rest = context.peer().partition(":")
    host, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return unquote(host).strip("[]"), int(port)
