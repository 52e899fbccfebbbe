"""Whether a request's client is still there: when it leaves, the work for it ends.

Owns a timer and a task for each request. The task begins a moment after the request has come, so that it does not stand
between a client and the worker that is to answer it.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from bough.gateway.outlet import Outlet
from bough.gateway.scopes import end_scope

A_MOMENT_S = 0.005


class Presence:
    """Ends a scope when the client leaves; ended by its owner."""

    def __init__(self, receive: Receive, outlet: Outlet) -> None:
        self.left = False
        self._receive = receive
        self._outlet = outlet
        self._listening: asyncio.Future[Message] | None = None

    def watch(self, scope: asyncio.Timeout) -> None:
        self._scope = scope
        self._timer = asyncio.get_running_loop().call_later(A_MOMENT_S, self._listen)

    def end(self) -> None:
        self._timer.cancel()
        if self._listening is not None:
            self._listening.remove_done_callback(self._leave)
            self._listening.cancel()

    def _listen(self) -> None:
        """The body is here: what comes can only be the client's leaving."""
        self._listening = asyncio.ensure_future(self._receive())
        self._listening.add_done_callback(self._leave)

    def _leave(self, listening: asyncio.Future[Message]) -> None:
        if not self._outlet.ended and not listening.cancelled():  # else it is only done with us
            self.left = True
            end_scope(self._scope)
