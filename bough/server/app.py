"""What every request passes before its endpoint: the phase of the server, its id, rules for browsers, route and key.

`Front` owns the phase: until the engine is ready, and while the server stops, requests get a 503. `App` owns the table
of routes. Paths work with and without the prefix of `--root-path`, because some proxies cut it off.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any
from urllib.parse import quote

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.core.server_settings import EdgeSettings, ServerSettings
from bough.observability.logs import current_request
from bough.observability.request_meter import RequestMeter
from bough.server.bodies import RECORDED_KEY, RECORDER_KEY, SETTINGS_KEY
from bough.server.browsers import BrowserRules, allowed_origins
from bough.server.crash_dump import RequestRecorder
from bough.server.endpoint import Endpoint, Keys, error_response
from bough.server.errors import Failure, HttpError, shape_of
from bough.server.held_bodies import HELD_KEY, HeldBody, server_room
from bough.server.http import SHUTDOWN_GRACE_S
from bough.server.http_protocol import HEADERS_KEY
from bough.server.tracing import RequestLogging

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID_KEY = "bough.request_id"
ALLOWED_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # visible ASCII: nothing that could break a header or a log line


# To ask the kernel for each would take long.
_ids = (drawn[at : at + 32] for drawn in iter(lambda: os.urandom(4096).hex(), "") for at in range(0, len(drawn), 32))


def assign_request_id(scope: Scope) -> str:
    """The client's own `X-Request-Id`, or a fresh one; it goes back with the response and stands in the log."""
    scope[HEADERS_KEY] = named = dict(reversed(scope["headers"]))
    given = named.get(b"x-request-id")
    chosen: str = given.decode() if given and ALLOWED_ID.fullmatch(given) else next(_ids)
    scope[REQUEST_ID_KEY] = chosen
    return chosen


Methods = dict[str, Endpoint]


def without_root(path: str, root_path: str) -> str:
    """The path of a route, without the prefix under which a proxy shows this server (`--root-path`); some proxies have
    cut it off and some have not."""
    prefix = root_path.strip("/")
    inside = prefix and f"{path}/".startswith(f"/{prefix}/")
    return path[1 + len(prefix) :] or "/" if inside else path


class App:
    def __init__(
        self, endpoints: Sequence[Endpoint], settings: ServerSettings, recorder: RequestRecorder | None = None
    ) -> None:
        self._recorder = recorder
        self._settings = settings
        self.bodies = server_room(settings)
        self._keys = Keys(settings.api_key, settings.admin_api_key)
        self._exact: dict[str, Methods] = {}
        patterns: dict[str, Methods] = {}
        for endpoint in endpoints:
            table = patterns if "{" in endpoint.path else self._exact
            methods = table.setdefault(endpoint.path, {})
            for method in endpoint.methods:
                if method in methods:
                    raise ValueError(f"{method} {endpoint.path} is declared twice")
                methods[method] = endpoint
        self._patterns = [(compile_path(path)[0], methods) for path, methods in patterns.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = without_root(scope["path"], self._settings.root_path)
        methods, parameters = self._find(path)
        endpoint = methods.get("GET" if scope["method"] == "HEAD" else scope["method"])
        if endpoint is None:
            await error_response(_no_endpoint(path, scope["method"], methods), shape_of(path))(scope, receive, send)
            return
        try:
            self._keys.check(endpoint.access, scope["headers"])
        except HttpError as error:
            await error_response(error.failure, endpoint.shape)(scope, receive, send)
            return
        scope["path_params"] = parameters
        scope[SETTINGS_KEY], scope[HELD_KEY] = self._settings, (held := HeldBody(self.bodies))
        if endpoint.access == "api":
            scope[RECORDER_KEY] = self._recorder
        try:
            await endpoint(scope, receive, send)
        finally:
            held.release()
        if (recorded := scope.get(RECORDED_KEY)) is not None:
            recorded.finished = True

    def _find(self, path: str) -> tuple[Methods, dict[str, Any]]:
        found = self._exact.get(path)
        if found is not None:
            return found, {}
        matches = ((pattern.match(path), methods) for pattern, methods in self._patterns)
        return next(((methods, match.groupdict()) for match, methods in matches if match), ({}, {}))


def with_cors(app: ASGIApp, settings: EdgeSettings) -> ASGIApp:
    origins = allowed_origins(settings)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_HEADER, "Server-Timing", "Retry-After"],
    )


def _no_endpoint(path: str, method: str, methods: Methods) -> Failure:
    if not methods:
        return Failure(404, f"There is no {path} here; /docs lists the routes.", "NotFoundError")
    allowed = ", ".join(sorted(methods))
    return Failure(405, f"{path} takes {allowed}, not {method}.", "MethodNotAllowedError", headers={"Allow": allowed})


def with_count(app: ASGIApp, meter: RequestMeter) -> ASGIApp:
    """Counts the requests in progress, other than the one that asks for the count."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].endswith("/metrics"):
            await app(scope, receive, send)
            return
        meter.http_requests(1)
        try:
            await app(scope, receive, send)
        finally:
            meter.http_requests(-1)

    return counted


class Phase(Enum):
    """The message of a 503 in each phase of the server's life."""

    LOADING = "The model is loading; try again soon."
    SERVING = ""
    DRAINING = "The server is shutting down and takes no more requests."
    DEAD = "The engine has ended."


class Front:
    """Serves once `open` has given it an application."""

    def __init__(
        self, *, logging: RequestLogging | None = None, root_path: str = "", browsers: BrowserRules | None = None
    ) -> None:
        self.phase = Phase.LOADING
        self._app: ASGIApp | None = None
        self._logging = logging or RequestLogging()
        self._root_path = root_path
        self._browsers = browsers
        self.active = 0  # requests in progress
        self._quiet = asyncio.Event()  # set when the last of them has ended

    def open(self, app: ASGIApp) -> None:
        self._app = app
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    async def drain(self, limit_s: float, end: Callable[[], None], ended: str) -> None:
        """Refuses new requests; those in progress may finish within the limit, then `end` ends them."""
        self.phase = Phase.DRAINING
        if self.active:
            log.info("stopping: %d requests may finish within %g s", self.active, limit_s)
        if not await self.drained(limit_s):
            log.warning("%d requests are %s: --drain-timeout-s is over", self.active, ended)
            end()
            await self.drained(SHUTDOWN_GRACE_S)

    async def drained(self, timeout_s: float) -> bool:
        """Waits for the requests in progress; False if some still are when the time is up."""
        self._quiet.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self.active:
                    await self._quiet.wait()
        return not self.active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a lifespan or a websocket, which this server does not have
            return
        identity = assign_request_id(scope)
        status, began = 0, time.perf_counter()
        current_request.set((identity, began))

        def named_send(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity.encode())]
            return send(message)

        serving = self.phase is Phase.SERVING
        counted = serving or self.phase is not Phase.DRAINING  # draining does not wait for what arrives after it began
        if counted:
            self.active += 1
        try:
            path = without_root(scope["path"], self._root_path) if self._root_path else scope["path"]
            refusal = None if self._browsers is None else self._browsers.refusal(scope, path)
            serving = serving or (path == "/metrics" and not counted)  # monitors can read it to the end
            if refusal is None and self._app is not None and serving:
                await self._app(scope, receive, named_send)
            else:
                headers = {"Retry-After": "1", "Connection": "close"}
                kind = "EngineDeadError" if self.phase is Phase.DEAD else "ServiceUnavailableError"
                closed = Failure(503, self.phase.value, kind, headers=headers)
                await error_response(refusal or closed, shape_of(path))(scope, receive, named_send)
        finally:
            if counted:
                self.active -= 1
                if not self.active:
                    self._quiet.set()
            if self._logging.on:
                took = (time.perf_counter() - began) * 1000
                path = quote(scope["path"])  # a decoded one may hold line breaks
                log.info("%s %s %s in %.1f ms", scope["method"], path, status or "disconnected", took)
