"""`bough serve`: an engine behind HTTP.

The main process opens the port, starts and watches the engine's processes, and serves; with `--tokenizer-worker-num`
further processes serve on the same socket. Slow work runs in threads, so the port answers from the first moment.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from pathlib import Path

import uvloop

from bough.core.custom_code import check_server_code
from bough.core.errors import EngineDeadError
from bough.core.settings import Settings
from bough.launch.client_end import ClientEnd
from bough.launch.replica import Replica
from bough.launch.serving import Serving, connect, in_thread
from bough.launch.spec import MODEL_EXECUTOR, ChildSpec, ServerSpec
from bough.launch.supervisor import Supervisor, print_own_stacks
from bough.observability.logs import set_up_logging
from bough.server.context import ServerContext
from bough.server.http import SHUTDOWN_GRACE_S, open_listener, url_of, welcome_text
from bough.server.model_info import ModelInfo
from bough.server.tracing import check_tracing

log = logging.getLogger(__name__)


def serve(settings: Settings, executor: str = MODEL_EXECUTOR) -> None:
    """Serves until told to stop. Raises what kept it from starting, or ended it."""
    set_up_logging("server", settings.process.log_level)
    check_tracing(settings.server.otlp_endpoint)
    check_server_code(settings)
    listener = open_listener(settings.server)
    try:
        uvloop.run(Service(settings, listener, executor).run())
    finally:
        listener.close()
        if settings.server.uds:
            with contextlib.suppress(FileNotFoundError):
                Path(settings.server.uds).unlink()


class Service:
    def __init__(self, settings: Settings, listener: socket.socket, executor: str) -> None:
        self._settings = settings
        self._executor = executor
        self._listener = listener
        # A copy that stays open when HTTP has closed its own: further processes are started with it.
        self._shared_listener = listener.dup() if settings.server.tokenizer_worker_num > 1 else None
        self._began = time.monotonic()
        self._supervisor: Supervisor | None = None

    async def run(self) -> None:
        url = url_of(self._listener, self._settings.server)

        def welcome(context: ServerContext) -> None:
            server = self._settings.server
            print(welcome_text(context.model.name, url, server, time.monotonic() - self._began), flush=True)

        self._serving = Serving(self._settings, self._listener)
        try:
            await self._serving.run(self._prepare, welcome, self._stop_tokenizer_workers)
        finally:
            if self._shared_listener is not None:
                self._shared_listener.close()

    async def _prepare(self, cleanup: contextlib.AsyncExitStack) -> ServerContext:
        settings = self._settings
        folders = cleanup.enter_context(contextlib.ExitStack())
        clients = settings.server.tokenizer_worker_num
        replica = await in_thread(lambda: Replica(settings, folders, clients, self._executor))
        end = ClientEnd(replica.addresses)

        def on_death(error: EngineDeadError) -> None:
            end.die(error)
            self._serving.die(error)

        # Each cleanup is registered before what it cleans up is begun: a start may fail at any point.
        cleanup.push_async_callback(in_thread, end.terminate)
        cleanup.callback(end.close)
        supervisor = self._supervisor = replica.supervise(on_death)
        cleanup.push_async_callback(in_thread, supervisor.close)
        cleanup.callback(end.send_shutdown)
        cleanup.callback(supervisor.expect_endings)
        end.open()
        replica.start()
        tokenizer = await in_thread(replica.open_tokenizer)
        await in_thread(replica.wait_until_ready)
        model = replica.describe()
        await self._start_tokenizer_workers(replica, model)

        def print_stacks() -> None:
            log.error("Where the processes are:")
            print_own_stacks("server")
            supervisor.print_stacks()

        return connect(end, tokenizer, replica.files, model, settings, cleanup, print_stacks)

    async def _start_tokenizer_workers(self, replica: Replica, model: ModelInfo) -> None:
        if self._shared_listener is None:
            return
        flat = self._settings.to_flat()
        fd = self._shared_listener.fileno()
        numbers = range(1, self._settings.server.tokenizer_worker_num)
        replica.supervisor.start(
            [ChildSpec("server", flat, replica.addresses, replica.files, ServerSpec(n, fd, model)) for n in numbers]
        )
        await in_thread(replica.wait_until_ready)

    async def _stop_tokenizer_workers(self) -> None:
        """They drain like this process does."""
        limit_s = self._settings.server.drain_timeout_s + 2 * SHUTDOWN_GRACE_S
        if self._supervisor is not None and self._shared_listener is not None:
            supervisor = self._supervisor
            await in_thread(lambda: supervisor.dismiss("server", limit_s))
