"""A further HTTP process of a server (`--tokenizer-worker-num`): it accepts connections on the main process's socket
and has a client of its own on the same engine."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import uvloop

from bough.core.errors import EngineDeadError
from bough.launch.client_end import ClientEnd
from bough.launch.parts import open_tokenizer
from bough.launch.serving import Serving, connect, in_thread
from bough.launch.spec import ChildSpec, ServerSpec
from bough.observability.logs import set_up_logging
from bough.server.context import ServerContext
from bough.server.http import SHUTDOWN_GRACE_S

MAIN_GONE = "The server's main process has ended, and the engine with it."


def run_server(spec: ChildSpec, announce: Callable[..., None], at_parents_end: list[Callable[[], None]]) -> None:
    """Serves until told to stop, or until its parent has gone; then open requests get an error."""
    assert spec.server is not None
    set_up_logging(f"server {spec.server.number}", spec.parse_settings().process.log_level)
    with contextlib.suppress(EngineDeadError):  # the main process reports it
        uvloop.run(_run(spec, spec.server, announce, at_parents_end))


async def _run(
    spec: ChildSpec, server: ServerSpec, announce: Callable[..., None], at_parents_end: list[Callable[[], None]]
) -> None:
    settings = spec.parse_settings()
    serving = Serving(settings, socket.socket(fileno=server.listener_fd))
    end = ClientEnd(spec.addresses, server.number)
    ended = threading.Event()

    def die() -> None:
        """On the thread that has seen the parent go, and that ends this process when it returns."""
        error = EngineDeadError(MAIN_GONE)
        end.die(error)
        serving.die(error)
        ended.wait(SHUTDOWN_GRACE_S)

    async def prepare(cleanup: contextlib.AsyncExitStack) -> ServerContext:
        cleanup.callback(end.close)
        end.open()
        tokenizer = await in_thread(lambda: open_tokenizer(spec.files, settings.model))
        # The main process prints the stacks of an engine that is stuck; here the watchdog only answers /health.
        return connect(end, tokenizer, spec.files, server.model, settings, cleanup, on_stuck=lambda: None)

    async def stop_alone() -> None:
        return

    at_parents_end.append(die)
    try:
        await serving.run(prepare, lambda context: announce(ready={}), stop_alone)
    finally:
        ended.set()
