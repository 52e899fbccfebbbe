"""The outermost layer of the server: is it open, whose request is this, may its page call, and how did it end.

Owns the phase of the server's life and the count of requests in progress. The port is open from the first moment; until
the engine is ready, and again when the server was told to stop, every request gets a 503 that says so; only
`/metrics` can be read to the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from enum import Enum
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.observability.logs import current_request
from bough.server.app import Root, shape_of
from bough.server.browsers import BrowserRules
from bough.server.errors import Failure
from bough.server.request_id import HEADER, assign_request_id
from bough.server.responses import error_response

log = logging.getLogger(__name__)


class Phase(Enum):
    """What the server tells those who come while it does not serve."""

    LOADING = "The model is loading; try again soon."
    SERVING = ""
    DRAINING = "The server is shutting down and takes no more requests."
    DEAD = "The engine has ended."


class Front:
    """Opens when it is given an application."""

    def __init__(
        self, *, log_requests: bool = False, root_path: str = "", browsers: BrowserRules | None = None
    ) -> None:
        self.phase = Phase.LOADING
        self._app: ASGIApp | None = None
        self._log_requests = log_requests
        self._root = Root(root_path)
        self._browsers = browsers
        self._active = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def open(self, app: ASGIApp) -> None:
        self._app = app
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    async def drained(self, timeout_s: float) -> bool:
        """Waits for the requests in progress; False if some still are when the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    @property
    def active(self) -> int:
        return self._active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a lifespan or a websocket, which this server does not have
            return
        identity = assign_request_id(scope)
        token = current_request.set(identity)
        status = 0
        began = time.perf_counter()

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER.lower().encode(), identity.encode())]
            await send(message)

        counted = self.phase is not Phase.DRAINING  # nobody waits for those who come later
        if counted:
            self._enter()
        try:
            refusal = None if self._browsers is None else self._browsers.refusal(scope)
            if refusal is not None:
                await self._turn_away(refusal, scope, receive, named_send)
            elif self._app is not None and self._lets_in(scope["path"]):
                await self._app(scope, receive, named_send)
            else:
                await self._turn_away(self._closed(), scope, receive, named_send)
        finally:
            if counted:
                self._leave()
            if self._log_requests:
                took = (time.perf_counter() - began) * 1000
                path = quote(scope["path"])  # a decoded one may hold line breaks
                log.info("%s %s %s in %.1f ms", scope["method"], path, status or "left", took)
            current_request.reset(token)

    def _lets_in(self, path: str) -> bool:
        """Whoever watches the server is to see how it ends, too."""
        watching = self._root.without(path) == "/metrics"
        return self.phase is Phase.SERVING or (self.phase is Phase.DRAINING and watching)

    def _closed(self) -> Failure:
        headers = {"Retry-After": "1", "Connection": "close"}
        return Failure(503, self.phase.value, "ServiceUnavailableError", headers=headers)

    async def _turn_away(self, failure: Failure, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(failure, shape_of(self._root.without(scope["path"])))(scope, receive, send)

    def _enter(self) -> None:
        self._active += 1
        self._quiet.clear()

    def _leave(self) -> None:
        self._active -= 1
        if not self._active:
            self._quiet.set()
