"""`bough gateway` as a process: from an open socket to its last answer.

Owns the order of its life: listen, open the gateway, start what feeds it with workers, serve until a signal, drain,
end. Told twice, it ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvloop

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.app import GatewayApp
from bough.gateway.config_file import ConfigFile
from bough.gateway.core import Gateway
from bough.gateway.launching import LocalEngines
from bough.gateway.management import Management
from bough.observability.logs import set_up_logging
from bough.server.front import Front, Phase
from bough.server.http import LAST_WORDS_S, HttpServer
from bough.server.listening import open_listener, url_of

log = logging.getLogger(__name__)


def run_gateway(settings: GatewaySettings) -> None:
    """Serves until told to stop. Raises what kept it from starting."""
    set_up_logging("gateway", settings.log_level)
    listener = open_listener(settings.edge())
    try:
        uvloop.run(serve(settings, listener, _announce))
    finally:
        listener.close()
        if settings.uds:
            with contextlib.suppress(FileNotFoundError):
                Path(settings.uds).unlink()


async def serve(settings: GatewaySettings, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    """One gateway on a socket, until SIGTERM or SIGINT."""
    ending = asyncio.Event()
    _take_signals(ending)
    front = Front()
    http = HttpServer(front, listener, settings.edge())
    async with contextlib.AsyncExitStack() as cleanup:
        gateway = Gateway(settings)
        await gateway.open()
        cleanup.push_async_callback(gateway.close)
        engines = LocalEngines(settings, gateway.registry)
        cleanup.push_async_callback(engines.close)
        engines.open()
        if settings.config is not None:
            file = ConfigFile(settings.config, gateway)
            file.apply()
            cleanup.callback(asyncio.create_task(file.watch()).cancel)
        front.open(GatewayApp(gateway, Management(gateway, engines.restart)))
        serving = asyncio.create_task(http.run_here())
        on_ready(url_of(listener, settings.edge()))
        await _until(ending, serving)
        await _drain(front, gateway, settings.drain_timeout_s)
        http.should_exit = True
        await serving


async def _drain(front: Front, gateway: Gateway, limit_s: float) -> None:
    """Nobody is let in any more; those inside finish, up to a limit."""
    front.phase = Phase.DRAINING
    if front.active:
        log.info("stopping: %d requests may finish within %g s", front.active, limit_s)
    if not await front.drained(limit_s):
        log.warning("%d requests are cut off: --drain-timeout-s is over", front.active)
        gateway.cut_off()
        await front.drained(LAST_WORDS_S)


async def _until(ending: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Until the end is wanted; whatever broke the HTTP server is raised."""
    waiting = asyncio.ensure_future(ending.wait())
    await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if serving.done():
        serving.result()


def _take_signals(ending: asyncio.Event) -> None:
    def take(number: int) -> None:
        if ending.is_set():
            os._exit(128 + number)
        ending.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, take, number)


def _announce(url: str) -> None:
    print(f"The gateway is served at {url}", flush=True)
