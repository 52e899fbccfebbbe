"""`bough gateway` as a process: listens, starts what provides workers, serves until a signal, drains.

A second signal ends it at once.
"""

import asyncio
import contextlib
import gc
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bough.core.child_environment import leave_with_parent, settle_garbage
from bough.core.errors import BoughError, SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.core.server_settings import EdgeSettings
from bough.gateway import processes
from bough.gateway.app import GatewayApp
from bough.gateway.config_file import ConfigFile
from bough.gateway.core import Gateway
from bough.gateway.kubernetes import KubernetesPods
from bough.gateway.launching import LocalEngines
from bough.gateway.management import Management, Route
from bough.observability.logs import set_up_logging
from bough.server.app import Front, with_cors
from bough.server.browsers import BrowserRules
from bough.server.http import HttpServer, end_on_signals, is_loopback, listening, unless_ending, url_of
from bough.server.tracing import check_tracing

log = logging.getLogger("bough.gateway.service")  # also as `__main__`, in a further process


def run_gateway(settings: GatewaySettings) -> None:
    set_up_logging("gateway", settings.log_level)
    check_tracing(settings.otlp_endpoint)

    def tell(url: str) -> None:
        page = "" if settings.disable_ui else f" (its page: {url}/ui)"
        print(f"The gateway is served at {url}{page}", flush=True)

    with listening(settings) as listener:
        uvloop.run(serve(settings, listener, tell))


async def serve(
    settings: GatewaySettings,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    group: processes.ProcessGroup | None = None,
) -> None:
    """One gateway process on a socket, until SIGTERM or SIGINT; all but the first are given a `group`."""
    ending = Ending()
    end_on_signals(ending)
    front = Front(browsers=BrowserRules(settings, loopback=is_loopback(listener)))
    http = HttpServer(front, listener, settings, onward=1)  # a connection to a worker
    async with contextlib.AsyncExitStack() as cleanup:
        gateway = Gateway(processes.divided(settings, 0 if group is None else group.number))
        cleanup.push_async_callback(gateway.close)
        await gateway.open()
        engines = await _feed(gateway, settings, ending, cleanup)
        children = None
        if settings.processes > 1 and group is None:
            group, children = _start_processes(settings, listener, engines, cleanup)
        management = await _management(gateway, engines, group, cleanup)
        front.open(with_cors(GatewayApp(gateway, management), settings))
        if settings.prometheus_port is not None and (group is None or not group.number):
            await _open_metrics(management, settings, settings.prometheus_port, cleanup)
        grpc = await _open_grpc(front, settings, cleanup)
        async with http.serving() as serving:
            settle_garbage()
            gc.set_threshold(20_000)  # requests leave no circles, and each look for some costs all that run
            on_ready(url_of(listener, settings))
            await unless_ending(asyncio.Event().wait(), ending, serving)
            if children is not None:
                children.terminate()
            ends = [front.drain(settings.drain_timeout_s, gateway.cut_off, "cut off")]
            if group is not None and group.first_is_gone:  # its ports are for a gateway that takes its place
                http.leave(settings.drain_timeout_s)
                ends += [server.stop(settings.drain_timeout_s) for server in grpc]
            await asyncio.gather(*ends)
    if ending.cause is not None:
        raise ending.cause


class Ending(asyncio.Event):
    """Set when the gateway is to end; `cause` is what went wrong."""

    cause: BaseException | None = None

    def because_of(self, cause: BaseException) -> None:
        self.cause = cause
        self.set()

    def if_failed(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.because_of(error)


async def _feed(
    gateway: Gateway, settings: GatewaySettings, ending: Ending, cleanup: contextlib.AsyncExitStack
) -> LocalEngines:
    """Starts the sources of workers besides the flags: launched engines, a file, Kubernetes."""
    engines = LocalEngines(settings, gateway.registry, ending.because_of)
    cleanup.push_async_callback(engines.close)
    engines.open()
    if settings.config is not None:
        file = ConfigFile(settings.config, gateway)
        file.apply()
        cleanup.callback(asyncio.create_task(file.watch()).cancel)
    if settings.service_discovery:
        port, namespace = settings.service_discovery_port, settings.service_discovery_namespace
        following = asyncio.create_task(KubernetesPods(gateway.registry, settings.selector, port, namespace).follow())
        following.add_done_callback(ending.if_failed)  # without a cluster, or the rights to look into it
        cleanup.callback(following.cancel)
    return engines


def _start_processes(
    settings: GatewaySettings, listener: socket.socket, engines: LocalEngines, cleanup: contextlib.AsyncExitStack
) -> tuple[processes.ProcessGroup, processes.ChildProcesses]:
    """Starts the other processes on a copy of the socket, which stays open when HTTP closes its own."""
    shared = listener.dup()
    cleanup.callback(shared.close)
    folder = Path(cleanup.enter_context(processes.private_folder()))
    children = processes.ChildProcesses(settings, shared.fileno(), folder, engines.launched)
    cleanup.push_async_callback(children.close)
    return processes.ProcessGroup(folder, 0, settings.processes), children


async def _management(
    gateway: Gateway, engines: LocalEngines, group: processes.ProcessGroup | None, cleanup: contextlib.AsyncExitStack
) -> Management:
    if group is None:
        return Management(gateway, engines.restart)
    cleanup.callback(group.close)
    # The first process answers for all, to the others too; what it sends them concerns each alone.
    private = Management(gateway)
    if not group.number:
        private = processes.SharedManagement(gateway, group, engines.restart, private=True)
    front = Front()
    front.open(GatewayApp(gateway, private, private=True))
    await cleanup.enter_async_context(processes.serving_privately(front, group.socket_path()))
    shared = processes.SharedManagement(gateway, group, engines.restart)
    await shared.catch_up()
    return shared


class OnlyMetrics(Management):
    def __init__(self, whole: Management) -> None:
        self.gateway, self._whole = whole.gateway, whole

    def find(self, method: str, path: str) -> Route | None:
        return self._whole.find(method, path) if path == "/metrics" else None


async def _open_metrics(
    management: Management, settings: GatewaySettings, port: int, cleanup: contextlib.AsyncExitStack
) -> None:
    edge = EdgeSettings(host=settings.prometheus_host or settings.host, port=port)
    listener = cleanup.enter_context(listening(edge))
    front = Front(browsers=BrowserRules(settings, loopback=is_loopback(listener)))
    front.open(GatewayApp(management.gateway, OnlyMetrics(management), private=True))
    await cleanup.enter_async_context(HttpServer(front, listener, edge).serving())
    log.info("metrics are at %s/metrics too", url_of(listener, edge))


async def _open_grpc(front: Front, settings: GatewaySettings, cleanup: contextlib.AsyncExitStack) -> list[Any]:
    """The gRPC server, if there is to be one."""
    if settings.grpc_port is None:
        return []
    try:
        from bough.gateway.grpc.front import serving_grpc
    except ImportError as error:
        text = f"--grpc-port needs gRPC; install it with `pip install 'bough[grpc]'` ({error.name} is missing)."
        raise SettingsError(text) from None
    server, _ = await cleanup.enter_async_context(serving_grpc(front, settings))
    return [server]


# ---- a further process of `--processes N`: python -m bough.gateway.service NUMBER FD FOLDER


def main() -> None:
    """Settings come as a line of JSON on standard input, which stays open: its end is the end of the first process."""
    number, fd, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=GatewaySettings)
    set_up_logging(f"gateway {number}", settings.log_level)
    leave_with_parent()
    group = processes.ProcessGroup(folder, number, settings.processes)
    try:
        uvloop.run(serve(settings, socket.socket(fileno=fd), lambda url: None, group))
    except BoughError as error:
        log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
