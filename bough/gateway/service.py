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
import tempfile
from collections.abc import Callable
from pathlib import Path

import uvloop

from bough.core.gateway_settings import GatewaySettings
from bough.core.settings import ServerSettings
from bough.gateway.app import GatewayApp
from bough.gateway.config_file import ConfigFile
from bough.gateway.core import Gateway
from bough.gateway.discovery.following import follow
from bough.gateway.discovery.kubernetes import KubernetesPods
from bough.gateway.launching import LocalEngines
from bough.gateway.management import Management, RouteTable
from bough.gateway.processes import ChildProcesses, Family, SharedManagement, divided
from bough.observability.logs import set_up_logging
from bough.server.front import Front, Phase
from bough.server.http import LAST_WORDS_S, HttpServer
from bough.server.listening import open_listener, url_of
from bough.server.tracing import check_tracing

log = logging.getLogger(__name__)


def run_gateway(settings: GatewaySettings) -> None:
    """Serves until told to stop. Raises what kept it from starting."""
    set_up_logging("gateway", settings.log_level)
    check_tracing(settings.otlp_endpoint)
    listener = open_listener(settings.edge())
    try:
        uvloop.run(serve(settings, listener, _announce))
    finally:
        listener.close()
        if settings.uds:
            with contextlib.suppress(FileNotFoundError):
                Path(settings.uds).unlink()


async def serve(
    settings: GatewaySettings, listener: socket.socket, on_ready: Callable[[str], None], family: Family | None = None
) -> None:
    """One gateway process on a socket, until SIGTERM or SIGINT; `family` is given to all but the first."""
    ending = asyncio.Event()
    _take_signals(ending)
    shared = listener.dup() if settings.processes > 1 and family is None else None  # stays open for the others
    front = Front()
    http = HttpServer(front, listener, settings.edge())
    async with contextlib.AsyncExitStack() as cleanup:
        gateway = Gateway(divided(settings))
        await gateway.open()
        cleanup.push_async_callback(gateway.close)
        engines = LocalEngines(settings, gateway.registry)
        cleanup.push_async_callback(engines.close)
        engines.open()
        if settings.config is not None:
            _follow_file(settings.config, gateway, cleanup)
        if settings.service_discovery:
            pods = KubernetesPods(
                settings.selector, settings.service_discovery_port, settings.service_discovery_namespace
            )
            following = asyncio.create_task(follow(pods, gateway.registry, "kubernetes"))
            following.add_done_callback(lambda task: _end_if_failed(task, ending))
            cleanup.callback(following.cancel)
        own = Management(gateway, engines.restart)
        management: RouteTable = own
        children = None
        if shared is not None:
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="bough-gateway-")))
            family = Family(folder, 0, settings.processes)
            children = ChildProcesses(settings, shared.fileno(), folder, engines.urls)
            cleanup.callback(shared.close)
            cleanup.push_async_callback(children.close)
            children.open()
        if family is not None:
            cleanup.push_async_callback(family.close)
            # The first process answers for all, to the others too; what it tells them concerns each alone.
            private = own if family.number else SharedManagement(own, family, private=True)
            await _listen_privately(gateway, private, family, cleanup)
            management = shared_management = SharedManagement(own, family)
            await shared_management.catch_up()
        front.open(GatewayApp(gateway, management))
        serving = asyncio.create_task(http.run_here())
        on_ready(url_of(listener, settings.edge()))
        await _until(ending, serving)
        if children is not None:
            children.tell_to_end()
        await _drain(front, gateway, settings.drain_timeout_s)
        http.should_exit = True
        await serving


def _end_if_failed(task: asyncio.Task[None], ending: asyncio.Event) -> None:
    """A source that cannot work (no cluster, no rights) is told; the gateway ends, as nothing would feed it."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s", task.exception())
        ending.set()


def _follow_file(path: str, gateway: Gateway, cleanup: contextlib.AsyncExitStack) -> None:
    file = ConfigFile(path, gateway)
    file.apply()
    cleanup.callback(asyncio.create_task(file.watch()).cancel)


async def _listen_privately(
    gateway: Gateway, management: RouteTable, family: Family, cleanup: contextlib.AsyncExitStack
) -> None:
    """The socket on which the gateway's other processes talk to this one; its folder lets nobody else in."""
    edge = ServerSettings(uds=str(family.socket_path()))
    listener = open_listener(edge)
    cleanup.callback(listener.close)
    front = Front()
    front.open(GatewayApp(gateway, management, private=True))
    http = HttpServer(front, listener, edge)
    serving = asyncio.create_task(http.run_here())

    async def stop() -> None:
        http.should_exit = True
        await serving

    cleanup.push_async_callback(stop)


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
