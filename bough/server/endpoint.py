"""One route, said once: how it is reached, guarded, described, and how its errors look.

An endpoint is an ASGI application: whatever its handler or its response raises before the first byte has gone out
becomes an error response in the protocol's own shape.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from bough.server.errors import Shape, failure_of, native_shape, set_field_names
from bough.server.responses import error_response

Handler = Callable[[Request], Awaitable[Response]]
EVENTS = "text/event-stream"
Access = Literal["open", "api", "admin"]  # no key; the API's key; the key for management


class ClientGoneError(Exception):
    """The client has left while its answer was being made; nobody is there to be told."""


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter in the address, for the OpenAPI page."""

    name: str
    type: Any  # whose JSON schema goes on the page
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A path with its handler. `body` and `answer` are types whose JSON schema goes on the OpenAPI page."""

    path: str
    handler: Handler
    summary: str
    methods: tuple[str, ...] = ("POST",)
    access: Access = "api"
    shape: Shape = native_shape
    tag: str = "native"
    body: Any = None
    answer: Any = None
    media_type: str = "application/json"
    other_types: tuple[str, ...] = ()  # media types that the answer has where it is asked for, such as EVENTS
    queries: tuple[Query, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        set_field_names({})  # a request that follows on its connection begins in its context
        request = Request(scope, receive)
        try:
            response = await self.handler(request)
            await response(scope, receive, watched_send)
        except (ClientGoneError, ClientDisconnect):
            return
        except Exception as error:
            # Not swallowed: the client is told, and a defect is logged with its traceback.
            if begun:
                raise
            await error_response(failure_of(error), self.shape)(scope, receive, send)
