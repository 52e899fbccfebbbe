"""`bough serve`: an engine behind HTTP, from the first open port to the last answer.

Owns the order of a server's life. The port opens first and says "loading"; the engine starts beside the event loop;
then requests are served until a signal or a death. Told to stop, the server takes nothing more, lets what runs finish
within a limit, and ends well; told twice, it ends at once. When a process of the engine dies, every open request is
told, and the server ends with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from bough.client.handle import EngineClient
from bough.core.errors import EngineDeadError
from bough.core.settings import Settings
from bough.launch.client_end import ClientEnd
from bough.launch.replica import Replica
from bough.launch.supervisor import Supervisor
from bough.observability.logs import set_up_logging
from bough.server.app import App, with_cors
from bough.server.context import ModelInfo, ServerContext
from bough.server.front import Front, Phase
from bough.server.http import LAST_WORDS_S, HttpServer
from bough.server.listening import open_listener, url_of
from bough.server.protocols import all_endpoints
from bough.server.watchdog import Watchdog
from bough.server.welcome import welcome_text

log = logging.getLogger(__name__)

T = TypeVar("T")


def serve(settings: Settings) -> None:
    """Serves until told to stop. Raises what kept it from starting, or ended it."""
    set_up_logging("server", settings.process.log_level)
    listener = open_listener(settings.server)
    try:
        uvloop.run(Service(settings, listener).run())
    finally:
        listener.close()
        if settings.server.uds:
            with contextlib.suppress(FileNotFoundError):
                Path(settings.server.uds).unlink()


class Service:
    """One server with its engine."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._began = time.monotonic()
        self._front = Front(log_requests=settings.server.log_requests)
        self._http = HttpServer(self._front, listener, settings.server)
        self._ending = asyncio.Event()  # a signal came, or the engine has died
        self._signals = 0
        self._death: EngineDeadError | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take_signal, number)
        serving = asyncio.create_task(self._http.run_here())
        async with contextlib.AsyncExitStack() as cleanup:
            cleanup.push_async_callback(self._stop_http, serving)
            context = await self._unless_ending(self._start_engine(cleanup), serving)
            if context is not None:
                self._open(context)
                await self._unless_ending(asyncio.Event().wait(), serving)
                await self._drain(context)
        if self._death is not None:
            raise self._death

    # Start ------------------------------------------------------------------------------------------------------------

    async def _start_engine(self, cleanup: contextlib.AsyncExitStack) -> ServerContext:
        """Everything slow happens in threads: the port already answers."""
        folders = cleanup.enter_context(contextlib.ExitStack())
        replica = await in_thread(lambda: Replica(self._settings, folders))
        end = ClientEnd(replica.addresses)
        loop = asyncio.get_running_loop()

        def on_death(error: EngineDeadError) -> None:
            end.die(error)
            loop.call_soon_threadsafe(self._take_death, error)

        cleanup.push_async_callback(in_thread, end.terminate)
        cleanup.callback(end.close)
        supervisor = replica.supervise(on_death)
        cleanup.push_async_callback(in_thread, supervisor.close)
        cleanup.callback(end.say_goodbye)
        end.open()
        replica.start()
        tokenizer = await in_thread(replica.open_tokenizer)
        await in_thread(replica.wait_until_ready)
        limits = replica.limits
        client = end.connect(tokenizer)
        return ServerContext(
            client=client,
            reader=replica.input_reader(tokenizer),
            tokenizer=tokenizer,
            model=ModelInfo(
                name=replica.served_model_name,
                path=replica.model_path,
                tokenizer_path=replica.tokenizer_path,
                architecture=limits["architecture"],
                context_length=limits["context_length"],
                vocab_size=limits["vocab_size"],
                created=int(time.time()),
                limits=limits,
            ),
            settings=self._settings,
            watchdog=self._watch(client, supervisor, cleanup),
        )

    def _watch(
        self, client: EngineClient, supervisor: Supervisor, cleanup: contextlib.AsyncExitStack
    ) -> Watchdog | None:
        timeout_s = self._settings.server.watchdog_timeout
        if not timeout_s:
            return None

        def print_stacks() -> None:
            faulthandler.dump_traceback(all_threads=True)
            supervisor.print_stacks()

        watchdog = Watchdog(client, timeout_s, print_stacks)
        cleanup.callback(asyncio.create_task(watchdog.run()).cancel)
        return watchdog

    def _open(self, context: ServerContext) -> None:
        server = self._settings.server
        self._front.open(with_cors(App(all_endpoints(context), server), server))
        url = url_of(self._listener, server)
        print(welcome_text(context.model.name, url, server, time.monotonic() - self._began), flush=True)

    # End --------------------------------------------------------------------------------------------------------------

    def _take_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + number)  # the engine's processes see their parent go, and go too
        self._ending.set()

    def _take_death(self, error: EngineDeadError) -> None:
        self._death = error
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
            log.error("%s", self._death)
            await self._front.drained(LAST_WORDS_S)
            return
        self._front.phase = Phase.DRAINING
        limit_s = self._settings.server.drain_timeout_s
        if self._front.active:
            log.info("stopping: %d requests may finish within %g s", self._front.active, limit_s)
        if not await self._front.drained(limit_s):
            log.warning("%d requests are aborted: --drain-timeout-s is over", self._front.active)
            context.client.abort(abort_all=True)
            await self._front.drained(LAST_WORDS_S)

    async def _stop_http(self, serving: asyncio.Task[None]) -> None:
        self._http.should_exit = True
        await serving


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work` in a thread that nobody waits for when the process ends: it may be in a long download."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # whoever waited has been cancelled
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def call() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001
            error = raised  # raised again where it is waited for
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=call, daemon=True, name="bough-start").start()
    return await future
