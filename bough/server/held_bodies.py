"""Clients' bodies, at the server and at the gateway: read within limits, and counted while they are held.

Received bytes count, not announced ones. A body that does not fit is refused: a waiting one would hold its memory.
"""

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from bough.core.errors import SettingsError
from bough.core.server_settings import ServerSettings
from bough.server.errors import HttpError
from bough.server.http_protocol import EXCHANGE_KEY, Exchange

MIB = 1 << 20
SMALL = MIB  # bytes of a body that may have the last quarter of the room
DEFAULT_ROOM_MB = 1024
HELD_KEY = "bough.held_body"  # of the scope


class BodyRoom:
    """How much one process holds. `headers` go with a refusal."""

    def __init__(self, largest_mb: int, room_mb: int, program: str, headers: dict[str, str]) -> None:
        if room_mb < 2 * largest_mb:
            raise SettingsError(f"--max-bodies-mb must be at least twice --max-body-mb ({largest_mb}), got {room_mb}.")
        self.largest, self.room, self.held = largest_mb * MIB, room_mb * MIB, 0
        self.program, self.headers = program, headers


def server_room(settings: ServerSettings) -> BodyRoom:
    largest = settings.max_body_mb
    return BodyRoom(largest, settings.max_bodies_mb or max(DEFAULT_ROOM_MB, 2 * largest), "server", {})


class HeldBody:
    def __init__(self, bodies: BodyRoom) -> None:
        self._bodies = bodies
        self._size = 0

    def whole(self, scope: Scope, most: int | None = None) -> bytes | None:
        """The whole body, if it is here: as nearly always."""
        exchange: Exchange | None = scope.get(EXCHANGE_KEY)
        body = None if exchange is None else exchange.take_whole()
        if body is not None:
            self._hold(body, self._bodies.largest if most is None else most)
        return body

    async def read(self, scope: Scope, receive: Receive, most: int | None = None) -> bytes:
        """The whole body; raises a 413 as soon as it is known to exceed `most`."""
        most = self._bodies.largest if most is None else most
        if (whole := self.whole(scope, most)) is not None:
            return whole
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                self._check(int(value), most)
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            self._hold(chunk, most)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _hold(self, chunk: bytes, most: int) -> None:
        size, bodies = self._size + len(chunk), self._bodies
        held = bodies.held + len(chunk)
        if size > most or held > bodies.room * 3 // 4:
            self._check(size, most)
        self._size, bodies.held = size, held

    def release(self) -> None:
        self._bodies.held -= self._size
        self._size = 0

    def _check(self, size: int, most: int) -> None:
        """Refuses a body that is too large. The last quarter of the room is kept for small bodies."""
        bodies = self._bodies
        if size > most:
            flag = " (--max-body-mb)" if most == bodies.largest else ""
            text = f"The body is larger than {most // MIB} MiB{flag}."
            raise HttpError(413, text, "RequestTooLargeError", bodies.headers)
        room = bodies.room if size <= SMALL else bodies.room * 3 // 4
        if bodies.held - self._size + size > room:
            message = f"The {bodies.program} holds as many bodies as it may (--max-bodies-mb); try again soon."
            raise HttpError(503, message, "ServiceUnavailableError", {"Retry-After": "1", **bodies.headers})
