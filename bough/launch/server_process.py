"""A further HTTP process of a server (`--tokenizer-worker-num`): it accepts connections on the main process's socket
and has a client of its own on the same engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

import uvloop

from bough.core.errors import EngineDeadError
from bough.launch.aside import in_thread
from bough.launch.client_end import ClientEnd
from bough.launch.parts import bounded_tokenizer, input_reader, open_tokenizer
from bough.launch.serving import Serving
from bough.launch.spec import ChildSpec, ServerSpec
from bough.launch.watching import connect_watched
from bough.observability.logs import set_up_logging
from bough.server.context import ServerContext
from bough.server.http import SHUTDOWN_GRACE_S
from bough.server.watchdog import Watchdog

MAIN_GONE = "The server's main process has ended, and the engine with it."


def run_server(spec: ChildSpec, announce: Callable[..., None], at_parents_end: list[Callable[[], None]]) -> None:
    """Serves until told to stop, or until its parent has gone; then those who wait are told so."""
    assert spec.server is not None
    settings = spec.parse_settings()
    set_up_logging(f"server {spec.server.number}", settings.process.log_level)
    listener = socket.socket(fileno=spec.server.listener_fd)
    with contextlib.suppress(EngineDeadError):  # the main process reports it
        uvloop.run(_run(spec, spec.server, listener, announce, at_parents_end))


async def _run(
    spec: ChildSpec,
    server: ServerSpec,
    listener: socket.socket,
    announce: Callable[..., None],
    at_parents_end: list[Callable[[], None]],
) -> None:
    settings = spec.parse_settings()
    serving = Serving(settings, listener)
    end = ClientEnd(spec.addresses, server.number)
    ended = threading.Event()

    def tell() -> None:
        """On the thread that has seen the parent go, and that ends this process when it returns."""
        error = EngineDeadError(MAIN_GONE)
        end.die(error)
        serving.die(error)
        ended.wait(SHUTDOWN_GRACE_S)

    async def prepare(cleanup: contextlib.AsyncExitStack) -> ServerContext:
        cleanup.callback(end.close)
        end.open()
        tokenizer = await in_thread(lambda: open_tokenizer(spec.files, settings.model))
        tokenizer = bounded_tokenizer(tokenizer, server.model.context_length, settings.scheduler)
        client = connect_watched(end, tokenizer, settings, server.model.name, cleanup)
        watchdog = None
        if settings.server.watchdog_timeout:
            # The main process prints the stacks; here it is only about /health.
            watchdog = Watchdog(client, settings.server.watchdog_timeout, lambda: None)
            cleanup.callback(asyncio.create_task(watchdog.run()).cancel)
        return ServerContext(
            client=client,
            reader=input_reader(spec.files, settings.model, tokenizer),
            tokenizer=tokenizer,
            model=server.model,
            settings=settings,
            watchdog=watchdog,
        )

    async def stop_alone() -> None:
        return

    at_parents_end.append(tell)
    try:
        await serving.run(prepare, lambda context: announce(ready={}), stop_alone)
    finally:
        ended.set()
