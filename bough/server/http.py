"""The listening socket, uvicorn on it, what ends it, and the lines that show its address.

The socket is opened before anything slow happens, so that its errors come first. The order of shutdown belongs to the
owner; `HttpServer` accepts connections while there are descriptors for them, and `http_protocol` speaks HTTP on them.
"""

import asyncio
import contextlib
import errno
import functools
import ipaddress
import itertools
import logging
import math
import os
import resource
import shlex
import signal
import socket
import ssl
import stat
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import uvicorn
from starlette.types import ASGIApp

from bough.core.errors import SettingsError
from bough.core.server_settings import EdgeSettings, ServerSettings
from bough.server.http_protocol import HttpProtocol

log = logging.getLogger(__name__)
BACKLOG = 2048
MOST_DESCRIPTORS = 1 << 16  # shells start programs with 1,024; more are permitted to those that ask
T = TypeVar("T")


def open_listener(settings: EdgeSettings) -> socket.socket:
    listener = _unix_socket(Path(settings.uds)) if settings.uds else _tcp_socket(settings.host, settings.port)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def listening(settings: EdgeSettings) -> Iterator[socket.socket]:
    """A listener for as long as the block lasts; the file of a unix socket goes with it."""
    listener = open_listener(settings)
    try:
        yield listener
    finally:
        listener.close()
        if settings.uds:
            Path(settings.uds).unlink(missing_ok=True)


def url_of(listener: socket.socket, settings: EdgeSettings) -> str:
    scheme = "https" if settings.ssl_certfile else "http"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}+unix://{settings.uds}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether it is bound to a TCP address that only programs on this machine reach, browsers among them."""
    if listener.family == socket.AF_UNIX:
        return False
    address = ipaddress.ip_address(listener.getsockname()[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _tcp_socket(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        # On :: it listens at all addresses, those of IPv4 too.
        listener = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=host == "::")
    except socket.gaierror as error:
        raise SettingsError(f"--host {host} is not an address of this machine: {error.strerror}.") from None
    except OSError as error:
        text = f"Cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}."
        if error.errno == errno.EADDRINUSE:
            text = f"Port {port} on {host} is in use; choose another with --port, or end what listens there."
        elif error.errno in (errno.EACCES, errno.EPERM):
            text = f"This user may not listen on port {port}; choose one above 1023 with --port."
        raise SettingsError(text) from None
    # The kernel sends each event at once: waiting to fill a packet would hold tokens back.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _unix_socket(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()  # left behind by a server that was killed
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(f"The socket {path} is in use; choose another with --uds.") from None
        raise SettingsError(f"Cannot listen on the unix socket {path}: {error.strerror or error}.") from None
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(os.fspath(path)) == 0


KEEP_ALIVE_S = 75  # clients and proxies reuse connections for about a minute; the server must not close them first
SHORT_KEEP_ALIVE_S = 2.0  # while new connections wait for descriptors
SHUTDOWN_GRACE_S = 5  # for responses that are still being written when the server stops


class HttpServer(uvicorn.Server):
    """Accepts connections itself: without a descriptor, libuv would take those that wait and close them at once. While
    few descriptors are left, connections wait in the kernel, where another process on the same socket can take them.
    The listener stays open, because closing it would reset them.

    A request may need `onward` descriptors besides its connection's own."""

    def __init__(self, app: ASGIApp, listener: socket.socket, settings: EdgeSettings, onward: int = 0) -> None:
        _check_certificate(settings)
        theirs = logging.getLogger("uvicorn")  # its errors go to Bough's log; its advice does not
        theirs.handlers[:] = logging.getLogger("bough").handlers
        theirs.propagate = not theirs.handlers
        theirs.setLevel(logging.ERROR)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # macOS permits less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_DESCRIPTORS)), hard))
        self._woken = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                server_header=False,
                proxy_headers=False,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            )
        )
        self._listener = listener
        self._onward, self._body_timeout_s = onward, settings.body_timeout_s
        self._full = True  # it does not accept

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers, self.started = [], True
        self._weigh(0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        await super().shutdown(sockets)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:  # another process has it
            return
        except OSError:  # no descriptor: it stays in the kernel
            self._weigh(sys.maxsize)
            return
        accepted.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._connect(accepted))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)
        self._weigh(accepted.fileno())  # the lowest free number: all below are in use

    async def _connect(self, accepted: socket.socket) -> None:
        made = functools.partial(HttpProtocol, self.config, self.server_state, self._body_timeout_s)
        with contextlib.suppress(OSError):  # the client has left, or does not speak TLS
            await asyncio.get_running_loop().connect_accepted_socket(made, accepted, ssl=self.config.ssl)

    def _weigh(self, used: int) -> None:
        """Accepts while each accepted request will find the descriptors that it needs, and a sixteenth is left for all
        else. A single connection is always taken, however low the limit."""
        limit, connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(self.server_state.connections)
        full = used >= (limit - limit // 16 - connections * self._onward if connections else limit)
        if full != self._full:
            self._full, loop = full, asyncio.get_running_loop()
            self._woken.set()
            if full:
                loop.remove_reader(self._listener)
            else:
                loop.add_reader(self._listener, self._accept)
            self.config.encoded_headers = [(b"connection", b"close")] if full else []  # ends connections without a race

    async def main_loop(self) -> None:
        """Uvicorn's own looks ten times a second, which is most of what an idle process costs."""
        for counter in itertools.count():
            if self._full:
                if counter % 100 == 0:  # once in ten seconds
                    log.warning("few file descriptors are left (ulimit -n): new connections wait until others end")
                for connection in list(self.server_state.connections):
                    cast(HttpProtocol, connection).close_idle(SHORT_KEEP_ALIVE_S)
                with contextlib.suppress(OSError):  # no descriptor for the look either
                    self._weigh(psutil.Process().num_fds())
            if await self.on_tick(0):  # renews the headers
                return
            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), 0.1 if self._full else 1.0)

    async def run_here(self) -> None:
        await self.serve(sockets=[self._listener])

    def leave(self, limit_s: float) -> None:
        """Closes the listener and idle connections now, the others after their request or so many seconds later."""
        self.config.timeout_graceful_shutdown = math.ceil(limit_s) + SHUTDOWN_GRACE_S
        self.should_exit = True
        self._woken.set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[asyncio.Task[None]]:
        """Serves for as long as the block lasts; the task ends before only where something broke it."""
        task = asyncio.create_task(self.run_here())
        try:
            yield task
        finally:
            self.leave(0)
            await task

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the owner's."""
        yield


def end_on_signals(ending: asyncio.Event) -> None:
    """SIGINT and SIGTERM set the event; a second one ends the process at once, and its children see it go."""
    signals = itertools.count()

    def take(number: int) -> None:
        if next(signals):
            os._exit(128 + number)
        ending.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, take, number)


async def unless_ending(work: Coroutine[Any, Any, T], ending: asyncio.Event, serving: asyncio.Task[None]) -> T | None:
    """The result of `work`; None when the server is to end before. Whatever broke the HTTP server is raised."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(ending.wait())
    try:
        await asyncio.wait({task, waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        return task.result() if task.done() else None
    finally:
        await cancel_all((task, waiting))


async def race(*tasks: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Waits until one of them is done or the time is up, and cancels the others."""
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels them and waits for their ends."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


def _check_certificate(settings: EdgeSettings) -> None:
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise SettingsError("--ssl-keyfile needs --ssl-certfile beside it.")
        return
    files = {"--ssl-certfile": settings.ssl_certfile, "--ssl-keyfile": settings.ssl_keyfile}
    given = [(flag, path) for flag, path in files.items() if path is not None]
    for flag, path in given:  # of two files, ssl does not say which one it could not read
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise SettingsError(f"{flag} {path} cannot be read: {error.strerror}.") from None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except ssl.SSLError as error:
        named = " with ".join(f"{flag} {path}" for flag, path in given)
        advice = "give a certificate and its own private key (PEM), in one file or in two."
        raise SettingsError(f"{named} cannot be used: {error}; {advice}") from None


EXAMPLE = '{"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}'


def welcome_text(model: str, url: str, settings: ServerSettings, seconds: float, facts: Mapping[str, object]) -> str:
    call = curl_text(url, settings)
    if facts.get("is_embedding"):
        call = call.replace("/generate", "/encode").replace(EXAMPLE, '{"text": "The capital of France"}')
    if facts.get("speech"):
        call = call.replace("/generate", "/v1/audio/transcriptions").split(" -H 'C")[0] + " -F file=@FILE.wav"
    page = "" if settings.disable_ui or settings.uds is not None else f" Its page: {url}/ui."
    return f"{model} is served at {url} (ready after {seconds:.1f} s).{page} Try:\n  {call}"


def curl_text(url: str, settings: ServerSettings) -> str:
    """A command for this server. A key is read from the environment. A certificate is often the server's own: `-k`."""
    words = ["curl"] if settings.ssl_certfile is None else ["curl", "-k"]
    if settings.uds is not None:
        words += ["--unix-socket", shlex.quote(settings.uds)]
        url = "https://localhost" if settings.ssl_certfile else "http://localhost"
    words.append(f"'{url}/generate'" if "[" in url else f"{url}/generate")
    if settings.api_key is not None:
        words += ["-H", '"Authorization: Bearer ${BOUGH_API_KEY:-YOUR_KEY}"']
    return " ".join([*words, "-H", "'Content-Type: application/json'", "-d", f"'{EXAMPLE}'"])
