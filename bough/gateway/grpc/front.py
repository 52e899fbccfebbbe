"""The gRPC server: three methods, each a request to the gateway's HTTP application over a unix socket of their own, so
that keys, limits, routing, retries and failover are those of HTTP.

A call that is cancelled or times out is a client that has disconnected: the worker aborts its request.
"""

import contextlib
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio
import msgspec
from starlette.types import ASGIApp

from bough.core.errors import RequestError, SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway.grpc import messages
from bough.gateway.http_client import HttpClient, Origin, out_of_descriptors
from bough.gateway.processes import private_folder, serving_privately
from bough.gateway.upstream_response import EventReader, UpstreamResponse
from bough.server.http import KEEP_ALIVE_S, SHUTDOWN_GRACE_S

MIB = 1 << 20
LARGEST_MESSAGE_MB = 4  # gRPC's own default: a message is decoded in one go, on the event loop
SHARE = 6  # of all descriptors for connections; as many calls take three each, here and to workers; the rest is HTTP's
DROPPED = ("content-type", "content-length", "te", "host", "connection")  # gRPC's own, and not the request's
FORWARDED = b"x-forwarded-for"


@contextlib.asynccontextmanager
async def serving_grpc(app: ASGIApp, settings: GatewaySettings) -> AsyncIterator[tuple[Any, int]]:
    """Serves the gateway's HTTP application over gRPC; gives the server and its port. Processes may share it."""
    host, port, certificate = settings.host, settings.grpc_port, settings.ssl_certfile
    largest = min(settings.max_body_mb, LARGEST_MESSAGE_MB) * MIB
    most, idle_ms = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE, KEEP_ALIVE_S * 1000
    options = [("grpc.max_receive_message_length", largest), ("grpc.so_reuseport", 1)]
    options += [("grpc.max_allowed_incoming_connections", most), ("grpc.max_connection_idle_ms", idle_ms)]
    options += [("grpc.server_handshake_timeout_ms", idle_ms)]
    with private_folder() as folder, contextlib.closing(HttpClient()) as client:
        socket = Path(folder) / "http.sock"
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
        front = GrpcFront(client, Origin("grpc", 0, socket_path=str(socket)))
        handlers = {
            "Generate": _unary(front.generate, messages.GenerateRequest),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(
                front.generate_stream, messages.GenerateRequest.FromString, messages.GenerateReply.SerializeToString
            ),
            "Health": _unary(front.health, messages.HealthRequest),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, handlers),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                bound = server.add_insecure_port(address)
            else:  # both may be in one file, as with HTTPS
                pair = (Path(settings.ssl_keyfile or certificate).read_bytes(), Path(certificate).read_bytes())
                bound = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except (RuntimeError, OSError) as error:
            raise SettingsError(f"--grpc-port: cannot listen on {address}: {error}.") from None
        async with serving_privately(app, socket):
            await server.start()
            try:
                yield server, bound
            finally:
                await server.stop(SHUTDOWN_GRACE_S)


def _unary(method: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(method, request.FromString, lambda reply: reply.SerializeToString())


class GrpcFront:
    def __init__(self, client: HttpClient, origin: Origin) -> None:
        self._client = client
        self._origin = origin

    async def generate(self, request: Any, context: Any) -> Any:
        with contextlib.closing(await self._complete(request, context, stream=False)) as response:
            return messages.reply_of(msgspec.json.decode(await response.read()))

    async def generate_stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        with contextlib.closing(await self._complete(request, context, stream=True)) as response:
            events = EventReader()
            while piece := await response.read_some():
                for data in events.feed(piece):
                    completion = msgspec.json.decode(data)
                    if completion.get("error") is not None:
                        await context.abort(grpc.StatusCode.UNAVAILABLE, messages.error_text(data))
                    yield messages.reply_of(completion)

    async def health(self, request: Any, context: Any) -> Any:
        with contextlib.closing(await self._ask(context, "GET", b"/readiness", (), b"")) as response:
            body = await response.read()
            if response.status == 200:
                return messages.HealthReply(status=messages.HealthReply.SERVING)
            return messages.HealthReply(status=messages.HealthReply.NOT_SERVING, reason=messages.error_text(body))

    async def _complete(self, request: Any, context: Any, *, stream: bool) -> UpstreamResponse:
        """The beginning of a 200; any other answer ends the call."""
        try:
            body = messages.completion_body(request, stream)
        except RequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        response = await self._ask(context, "POST", b"/v1/completions", _headers_of(context), body)
        if response.status != 200:
            with contextlib.closing(response):
                await _refuse(context, response)
        return response

    async def _ask(self, context: Any, *request: Any) -> UpstreamResponse:
        try:
            return await self._client.request(self._origin, *request)
        except OSError as error:
            advice = "raise ulimit -n" if out_of_descriptors(error) else "try again soon"
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"The gateway cannot take the call: {error}; {advice}.")
            raise AssertionError from None  # `abort` has ended the call


async def _refuse(context: Any, response: UpstreamResponse) -> NoReturn:
    code = getattr(grpc.StatusCode, messages.CODES.get(response.status, "INTERNAL"))
    after = response.named.get(b"retry-after")
    details = messages.error_text(await response.read())
    await context.abort(code, details, () if after is None else (("retry-after", after.decode()),))
    raise AssertionError  # `abort` has ended the call


def _headers_of(context: Any) -> list[tuple[bytes, bytes]]:
    """The metadata as HTTP headers, without gRPC's own and binary values, and the client's address."""
    headers = [(b"content-type", b"application/json")]
    for name, value in context.invocation_metadata():
        if isinstance(value, str) and name not in DROPPED and not name.startswith((":", "grpc-")):
            headers.append((name.lower().encode(), value.encode("latin-1", "replace")))
    # gRPC's form of the address is such as `ipv4:127.0.0.1:50412`.
    family, _, rest = context.peer().partition(":")
    if family in ("ipv4", "ipv6") and not any(name == FORWARDED for name, _ in headers):
        headers.append((FORWARDED, unquote(rest.rpartition(":")[0]).strip("[]").encode()))
    return headers
