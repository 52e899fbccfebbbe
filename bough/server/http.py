"""uvicorn as this server runs it: on a given socket, with uvloop and httptools, its life in the owner's hands.

Signals, logs and the order of shutdown are the owner's; uvicorn only speaks HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from bough.core.errors import SettingsError
from bough.core.settings import ServerSettings

KEEP_ALIVE_S = 75  # clients and proxies reuse connections for about a minute; the server must not close them first
LAST_WORDS_S = 5  # for responses that are being written when the server ends


class HttpServer(uvicorn.Server):
    """Serves until `should_exit`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, settings: ServerSettings) -> None:
        _check_certificate(settings)
        _take_logs()
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                root_path="",
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )
        self._listener = listener

    async def run_here(self) -> None:
        """Serves on the running event loop."""
        await self.serve(sockets=[self._listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the owner's."""
        yield


def _take_logs() -> None:
    """uvicorn's errors go where ours go. Its warnings are about what strangers send, who are told of it themselves."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers[:] = logging.getLogger("bough").handlers
    theirs.propagate = not theirs.handlers
    theirs.setLevel(logging.ERROR)


def _check_certificate(settings: ServerSettings) -> None:
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise SettingsError("--ssl-keyfile needs --ssl-certfile beside it.")
        return
    files = {"--ssl-certfile": settings.ssl_certfile, "--ssl-keyfile": settings.ssl_keyfile}
    given = [(flag, path) for flag, path in files.items() if path is not None]
    for flag, path in given:
        _require_readable(flag, path)
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except ssl.SSLError as error:
        named = " with ".join(f"{flag} {path}" for flag, path in given)
        raise SettingsError(
            f"{named} cannot be used: {error}; give a certificate and its own private key (PEM), in one file or in two."
        ) from None


def _require_readable(flag: str, path: str) -> None:
    """Of two files, ssl does not say which one it could not read."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise SettingsError(f"{flag} {path} cannot be read: {error.strerror}.") from None
