"""One HTTP process: from an open socket to its last answer.

Owns the order of its life. It says "loading" until it is prepared, then serves until a signal or a death. Told to stop,
it takes nothing more and lets what runs finish within a limit; told twice, it ends at once. When the engine dies, every
open request is told, and the reason is raised. How it is prepared, and what it belongs to, is left to `service` and
`server_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from bough.core.errors import EngineDeadError
from bough.core.settings import Settings
from bough.launch.garbage import settle_garbage
from bough.server.app import App, Front, Phase, with_cors
from bough.server.browsers import BrowserRules
from bough.server.context import ServerContext
from bough.server.http import SHUTDOWN_GRACE_S, HttpServer, is_loopback
from bough.server.protocols import all_endpoints
from bough.server.tracing import with_tracing

log = logging.getLogger(__name__)

T = TypeVar("T")
Prepare = Callable[[contextlib.AsyncExitStack], Coroutine[Any, Any, ServerContext]]


class Serving:
    """A process that answers requests; all of it on one event loop, but for `die`."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        server = settings.server
        browsers = BrowserRules(server, loopback=is_loopback(listener))
        self._front = Front(log_requests=server.log_requests, root_path=server.root_path, browsers=browsers)
        self._http = HttpServer(self._front, listener, server)
        self._ending = asyncio.Event()  # a signal came, or the engine has died
        self._signals = 0
        self._death: EngineDeadError | None = None

    async def run(
        self, prepare: Prepare, on_ready: Callable[[ServerContext], None], on_stop: Callable[[], Awaitable[None]]
    ) -> None:
        """`prepare` is cancelled when the server is told to stop before it is done; `on_stop` is called when it is
        told to stop later, and may wait for others that stop with it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._take_signal, number)
        serving = asyncio.create_task(self._http.run_here())
        async with contextlib.AsyncExitStack() as cleanup:
            cleanup.push_async_callback(self._stop_http, serving)
            context = await self._unless_ending(prepare(cleanup), serving)
            if context is not None:
                server = self._settings.server
                app = with_cors(App(all_endpoints(context), server), server)
                settle_garbage()
                self._front.open(with_tracing(app, server.otlp_endpoint))
                on_ready(context)
                await self._unless_ending(asyncio.Event().wait(), serving)
                others = asyncio.ensure_future(on_stop())
                await self._drain(context)
                await others
        if self._death is not None:
            raise self._death

    def die(self, error: EngineDeadError) -> None:
        """The engine has ended. From any thread; its client is told by others."""
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            self._loop.call_soon_threadsafe(self._take_death, error)

    def _take_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + number)  # child processes see their parent go, and go too
        self._ending.set()

    def _take_death(self, error: EngineDeadError) -> None:
        self._death = self._death or error
        self._front.phase = Phase.DEAD
        self._ending.set()

    async def _unless_ending(self, work: Coroutine[Any, Any, T], serving: asyncio.Task[None]) -> T | None:
        """The result of `work`; None when the server is to end before. Whatever broke the HTTP server is raised."""
        task = asyncio.ensure_future(work)
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({task, ending, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return task.result() if task.done() else None
        finally:
            for each in (task, ending):
                each.cancel()
            await asyncio.gather(task, ending, return_exceptions=True)

    async def _drain(self, context: ServerContext) -> None:
        """Nobody is let in any more; those inside finish, up to a limit, and are then told that they cannot."""
        if self._death is not None:
            await self._front.drained(SHUTDOWN_GRACE_S)
            return
        self._front.phase = Phase.DRAINING
        limit_s = self._settings.server.drain_timeout_s
        if self._front.active:
            log.info("stopping: %d requests may finish within %g s", self._front.active, limit_s)
        if not await self._front.drained(limit_s):
            log.warning("%d requests are aborted: --drain-timeout-s is over", self._front.active)
            context.client.abort(abort_all=True)
            await self._front.drained(SHUTDOWN_GRACE_S)

    async def _stop_http(self, serving: asyncio.Task[None]) -> None:
        self._http.should_exit = True
        await serving
