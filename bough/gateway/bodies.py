"""Clients' bodies: read within limits, and counted while somebody holds them.

Owns how many bytes of bodies the process holds. What counts is what has come, not what is announced, so that a client
that announces much and sends nothing takes no room from others. A body that finds no room is refused and not left to
wait: it would hold what it has meanwhile.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope

from bough.core.errors import SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway.excerpt import excerpt_of
from bough.gateway.headers import RawHeaders
from bough.gateway.peek import LARGE, Peek, peek
from bough.server.errors import HttpError

MIB = 1 << 20
PAUSE_S = 60.0  # for the next piece of a body; who sends nothing holds memory for nothing
SHARE = 2  # bodies of the largest size that fit, unless the settings say otherwise
CLOSED = {"Connection": "close"}  # the rest of the body is not read


class ClientLeftError(Exception):
    """The client left before its request was here."""


class Bodies:
    """The bodies that one gateway process holds."""

    def __init__(self, settings: GatewaySettings) -> None:
        largest = settings.max_body_mb
        room = SHARE * largest if settings.max_bodies_mb is None else settings.max_bodies_mb
        if room < 2 * largest:
            raise SettingsError(f"--max-bodies-mb must be at least twice --max-body-mb ({largest}), got {room}.")
        self.largest = largest * MIB
        self.room = room * MIB
        self.held = 0
        self._turn = asyncio.Lock()  # large bodies are looked into one after the other

    async def peek(self, body: bytes, headers: RawHeaders) -> Peek:
        """What routing needs of a body. Others get their turn while a large one is gone through."""
        if len(body) > LARGE:
            async with self._turn:
                body = await excerpt_of(body)
        return peek(body, headers)


class HeldBody:
    """The body of one request; it counts until it is released."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    async def read(self, scope: Scope, receive: Receive, most: int) -> bytes:
        """The whole body: it is looked at, and may have to be sent again. Raises a 413 for one larger than `most`, as
        soon as that is known."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                self._check(int(value), most)
        chunks: list[bytes] = []
        while True:
            message = await _next_message(receive)
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            chunk = message.get("body", b"")
            self._check(self._size + len(chunk), most)
            self._size += len(chunk)
            self._bodies.held += len(chunk)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        self._bodies.held -= self._size
        self._size = 0

    def _check(self, size: int, most: int) -> None:
        """Whether the body may be as large as that. The last quarter of the room is for small ones, so that a few that
        are large do not turn everybody away."""
        if size > most:
            flag = " (--max-body-mb)" if most == self._bodies.largest else ""
            raise HttpError(413, f"The body is larger than {most // MIB} MiB{flag}.", "RequestTooLargeError", CLOSED)
        room = self._bodies.room if size <= LARGE else self._bodies.room * 3 // 4
        if self._bodies.held - self._size + size > room:
            message = "The gateway holds as many bodies as it may (--max-bodies-mb); try again soon."
            raise HttpError(503, message, "ServiceUnavailableError", {"Retry-After": "1", **CLOSED})


async def _next_message(receive: Receive) -> Message:
    try:
        async with asyncio.timeout(PAUSE_S):
            return await receive()
    except TimeoutError:
        message = f"Nothing more of the body came for {PAUSE_S:g} s."
        raise HttpError(408, message, "RequestTimeoutError", CLOSED) from None
