"""The gateway over gRPC: `gateway.proto` is the contract, `serve_grpc` the server.

Every call becomes a request to the gateway's own HTTP application, in the same process and without a socket, so keys,
limits, routing, retries and failover are those of HTTP. Needs `bough[grpc]`, which is loaded only when asked for.
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp

from bough.core.errors import SettingsError


class GrpcServer:
    """A running server; `port` is the one it was given."""

    def __init__(self, server: Any, port: int) -> None:
        self._server = server
        self.port = port

    async def stop(self, grace_s: float) -> None:
        """No new calls; those in progress may take so long to end."""
        await self._server.stop(grace_s)


async def serve_grpc(app: ASGIApp, host: str, port: int, **options: Any) -> GrpcServer:
    """Starts the server; `options` are those of `front.serve_grpc`."""
    try:
        from bough.gateway.grpc import front
    except ImportError as error:
        raise SettingsError(
            f"--grpc-port needs gRPC; install it with `pip install 'bough[grpc]'` ({error.name} is missing)."
        ) from None
    return GrpcServer(*await front.serve_grpc(app, host, port, **options))
