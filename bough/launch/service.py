"""`bough serve`: an engine behind HTTP.

The main process opens the port, starts and watches the engine's processes, and serves; with `--tokenizer-worker-num`
further processes serve on the same socket. Slow work runs in threads, so the port answers from the first moment.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import uvloop

from bough.client.handle import RequestWatcher
from bough.core.child_environment import settle_garbage
from bough.core.custom_code import check_server_code
from bough.core.daemon_thread import in_daemon_thread
from bough.core.errors import EngineDeadError
from bough.core.files import user_path
from bough.core.settings import Settings
from bough.launch.client_end import ClientEnd
from bough.launch.engine_processes import EngineProcesses
from bough.launch.node_process import run_node, serve_health
from bough.launch.nodes import check_nodes
from bough.launch.parts import attach_media, input_reader, open_tokenizer
from bough.launch.spec import MODEL_EXECUTOR, ChildSpec, ServerSpec
from bough.launch.supervisor import Supervisor, print_own_stacks
from bough.loader.locate import ModelFiles
from bough.messages.channels import cluster_key
from bough.observability.logs import set_up_logging
from bough.observability.request_meter import RequestMeter
from bough.server import http, tracing
from bough.server.app import App, Front, Phase, with_cors, with_count
from bough.server.browsers import BrowserRules
from bough.server.context import ServerContext
from bough.server.crash_dump import RequestRecorder
from bough.server.held_bodies import server_room
from bough.server.model_info import ModelInfo
from bough.server.protocols import all_endpoints
from bough.server.watchdog import Watchdog
from bough.tokenizer.tokenizer import TextBound, Tokenizer

log = logging.getLogger(__name__)

MAIN_GONE = "The server's main process has ended, and the engine with it."

T = TypeVar("T")


def serve(settings: Settings, executor: str = MODEL_EXECUTOR) -> None:
    """Serves until told to stop. Raises what kept it from starting, or ended it."""
    set_up_logging("server", settings.process.log_level)
    tracing.check_tracing(settings.server.otlp_endpoint)
    check_server_code(settings, keyed=settings.server.api_key is not None)
    server_room(settings.server)
    check_nodes(settings.parallel)
    if settings.parallel.node_rank:
        run_node(settings, cluster_key(), executor, serve_health(settings))
        return

    async def run(listener: socket.socket) -> None:
        await MainServer(settings, listener, executor).run()

    with http.listening(settings.server) as listener:
        uvloop.run(run(listener))


def run_server(spec: ChildSpec, announce: Callable[..., None], at_parents_end: list[Callable[[str], None]]) -> None:
    """A further HTTP process (`--tokenizer-worker-num`), with a client of its own on the same engine."""
    assert spec.server is not None
    set_up_logging(f"server {spec.server.number}", spec.parse_settings().process.log_level)

    async def run(server: ServerSpec) -> None:
        worker = TokenizerWorker(spec, server, announce)
        at_parents_end.append(worker.lose_parent)
        try:
            await worker.run()
        finally:
            worker.ended.set()

    with contextlib.suppress(EngineDeadError):  # the main process reports it
        uvloop.run(run(spec.server))


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work` in a daemon thread: the process may end while it is in a long download."""
    return await asyncio.wrap_future(in_daemon_thread(work))


class Serving(ABC):
    """One HTTP process, all of it on one event loop but for `die`. It answers "loading" until it is prepared, then
    serves until a signal or a death. The first signal lets running requests finish within a limit, the second ends the
    process at once. When the engine dies, every open request gets an error."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        server = settings.server
        browsers = BrowserRules(server, loopback=http.is_loopback(listener))
        self._logging = tracing.RequestLogging(server.log_requests, server.log_requests_level)
        self._front = Front(logging=self._logging, root_path=server.root_path, browsers=browsers)
        folder = server.crash_dump_folder
        self._recorder = None if folder is None else RequestRecorder(user_path(folder))
        self._http = http.HttpServer(self._front, listener, server)
        self._ending = asyncio.Event()  # a signal came, or the engine has died
        self._death: EngineDeadError | None = None

    @abstractmethod
    async def prepare(self, cleanup: contextlib.AsyncExitStack) -> ServerContext:
        """A signal cancels it."""

    @abstractmethod
    def on_ready(self, context: ServerContext) -> None:
        """It serves."""

    def connect(
        self,
        end: ClientEnd,
        tokenizer: Tokenizer | None,
        files: ModelFiles,
        model: ModelInfo,
        cleanup: contextlib.AsyncExitStack,
        on_stuck: Callable[[], None] = lambda: None,
        end_replica: Callable[[int, str], None] = lambda number, reason: None,
    ) -> ServerContext:
        """The client with its meter, log and traces, and the watchdog, which calls `on_stuck` and `end_replica`. Texts
        come from anybody and have any length, so the tokenizer is bounded."""
        settings, server = self._settings, self._settings.server
        bound = TextBound(model.context_length, cut=settings.scheduler.allow_auto_truncate)
        tokenizer = tokenizer and tokenizer.bounded(bound)
        recent = tracing.RecentRequests()
        watchers: list[RequestWatcher] = [tracing.RequestLog(self._logging, tokenizer), recent]
        if server.otlp_endpoint is not None:
            traces = tracing.RequestTraces(tracing.otlp_exporter(server.otlp_endpoint), model.name)
            cleanup.push_async_callback(in_thread, traces.close)
            watchers.append(traces)
        method, cache_tokens = settings.parallel.load_balance_method, model.limits["max_total_num_tokens"]
        client = end.connect(tokenizer, method, cache_tokens, RequestMeter(end.folder, end.number), watchers)
        client.on_command = self._logging.obey
        cleanup.push_async_callback(in_thread, attach_media(client, files, settings, tokenizer))
        watchdog = None
        if server.watchdog_timeout:
            apart = settings.parallel.groups == 1
            watchdog = Watchdog(client, server.watchdog_timeout, on_stuck, end_replica if apart else None)
            cleanup.callback(asyncio.create_task(watchdog.run()).cancel)
        reader = input_reader(files, settings.model, tokenizer)
        main_pid = os.getppid() if end.number else os.getpid()
        return ServerContext(client, reader, tokenizer, model, settings, watchdog, main_pid, recent)

    async def stop_others(self) -> None:
        """Ends the other processes that serve on the same socket, if they are this one's."""
        return

    async def run(self) -> None:
        http.end_on_signals(self._ending)
        async with self._http.serving() as serving, contextlib.AsyncExitStack() as cleanup:
            context = await http.unless_ending(self.prepare(cleanup), self._ending, serving)
            if context is not None:
                server = self._settings.server
                app = with_cors(App(all_endpoints(context), server, self._recorder), server)
                app = with_count(app, context.client.meter)
                settle_garbage()
                self._front.open(tracing.with_tracing(app, server.otlp_endpoint))
                self.on_ready(context)
                await http.unless_ending(asyncio.Event().wait(), self._ending, serving)
                others = asyncio.ensure_future(self.stop_others())
                await self._drain(context)
                await others
        if self._death is not None:
            raise self._death

    def die(self, error: EngineDeadError) -> None:
        """The engine has ended. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            self._loop.call_soon_threadsafe(self._take_death, error)

    def _take_death(self, error: EngineDeadError) -> None:
        if self._recorder is not None and self._death is None:
            self._recorder.write(str(error))
        self._death = self._death or error
        self._front.phase = Phase.DEAD
        self._ending.set()

    async def _drain(self, context: ServerContext) -> None:
        if self._death is not None:
            await self._front.drained(http.SHUTDOWN_GRACE_S)
            return
        abort = partial(context.client.abort, abort_all=True)
        await self._front.drain(self._settings.server.drain_timeout_s, abort, "aborted")


class MainServer(Serving):
    """The HTTP process that owns the engine, and the first to serve it."""

    def __init__(self, settings: Settings, listener: socket.socket, executor: str) -> None:
        super().__init__(settings, listener)
        self._executor = executor
        # A copy that stays open when HTTP has closed its own: further processes are started with it.
        self._shared_listener = listener.dup() if settings.server.tokenizer_worker_num > 1 else None
        self._url = http.url_of(listener, settings.server)
        self._began = time.monotonic()
        self._supervisor: Supervisor | None = None
        self._ready = False

    def on_ready(self, context: ServerContext) -> None:
        seconds = time.monotonic() - self._began
        model, server = context.model, self._settings.server
        print(http.welcome_text(model.name, self._url, server, seconds, model.limits), flush=True)

    async def prepare(self, cleanup: contextlib.AsyncExitStack) -> ServerContext:
        settings = self._settings
        if self._shared_listener is not None:
            cleanup.callback(self._shared_listener.close)
        folders = cleanup.enter_context(contextlib.ExitStack())
        clients = settings.server.tokenizer_worker_num
        processes = await in_thread(lambda: EngineProcesses(settings, folders, clients, self._executor))
        end = ClientEnd(processes.addresses, **processes.of_hosts)

        def on_death(error: EngineDeadError) -> None:
            if self._ready:  # else `wait_until_ready` raises the child's own error
                self.die(error)  # first: it writes down which requests are running
            end.die(error)

        # Each cleanup is registered before what it cleans up is begun: a start may fail at any point.
        cleanup.push_async_callback(in_thread, end.terminate)
        cleanup.callback(end.close)
        supervisor = self._supervisor = processes.supervisor
        supervisor.on_death, supervisor.on_loss = on_death, end.lose
        cleanup.push_async_callback(in_thread, supervisor.close)
        cleanup.callback(end.send_shutdown)
        cleanup.callback(supervisor.expect_endings)
        end.open()
        processes.start()
        tokenizer = await in_thread(processes.open_tokenizer)
        await in_thread(processes.wait_until_ready)
        processes.limits["startup_time"]["tokenizer_e2e"] = round(time.monotonic() - self._began, 3)
        model = processes.describe()
        await self._start_tokenizer_workers(processes, model)
        self._ready = True
        if supervisor.error is not None:
            raise supervisor.error

        def print_stacks() -> None:
            log.error("Where the processes are:")
            print_own_stacks("server")
            supervisor.print_stacks()

        return self.connect(end, tokenizer, processes.files, model, cleanup, print_stacks, supervisor.end_replica)

    async def _start_tokenizer_workers(self, processes: EngineProcesses, model: ModelInfo) -> None:
        if self._shared_listener is None:
            return
        flat = self._settings.to_flat()
        fd, ways, more = self._shared_listener.fileno(), processes.addresses, processes.of_hosts
        numbers = range(1, self._settings.server.tokenizer_worker_num)
        processes.supervisor.start(
            [
                ChildSpec("server", flat, ways[0], processes.files, ServerSpec(n, fd, model, tuple(ways)), **more)
                for n in numbers
            ]
        )
        await in_thread(processes.wait_until_ready)

    async def stop_others(self) -> None:
        """They drain like this process does."""
        limit_s = self._settings.server.drain_timeout_s + 2 * http.SHUTDOWN_GRACE_S
        if self._supervisor is not None and self._shared_listener is not None:
            supervisor = self._supervisor
            await in_thread(lambda: supervisor.dismiss("server", limit_s))


class TokenizerWorker(Serving):
    """Serves on the main process's socket until told to stop, or until its parent has gone; then open requests get an
    error."""

    def __init__(self, spec: ChildSpec, server: ServerSpec, announce: Callable[..., None]) -> None:
        super().__init__(spec.parse_settings(), socket.socket(fileno=server.listener_fd))
        self._files = spec.files
        self._model = server.model
        self._announce = announce
        self._end = ClientEnd(server.replicas, server.number, spec.listeners, spec.cluster_key)
        self.ended = threading.Event()

    def lose_parent(self, reason: str) -> None:
        """On the thread that has seen the parent go, and that ends this process when it returns. No reason was given
        if the parent was killed."""
        error = EngineDeadError(reason or MAIN_GONE)
        self.die(error)  # first: it writes down which requests are running
        self._end.die(error)
        self.ended.wait(http.SHUTDOWN_GRACE_S)

    async def prepare(self, cleanup: contextlib.AsyncExitStack) -> ServerContext:
        cleanup.callback(self._end.close)
        self._end.open()
        tokenizer = await in_thread(lambda: open_tokenizer(self._files, self._settings.model))
        # The main process prints the stacks of an engine that is stuck; here the watchdog only answers /health.
        return self.connect(self._end, tokenizer, self._files, self._model, cleanup)

    def on_ready(self, context: ServerContext) -> None:
        self._announce(ready={})
