"""One request to an ASGI application in the same process: its status and its bytes as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from starlette.types import ASGIApp, Message

SHUTDOWN_GRACE_S = 5.0  # for an application whose client has left to notice


class Exchange:
    """An async context: leaving it before the end disconnects the client."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        client: tuple[str, int] | None,
    ) -> None:
        self._app = app
        self._body: bytes | None = body
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "2",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*headers, (b"content-length", str(len(body)).encode())],
            "client": client,
            "server": None,
        }
        self._pieces: asyncio.Queue[Message] = asyncio.Queue(maxsize=16)  # a slow reader slows the application down
        self._left = asyncio.Event()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        try:
            start = await self._next()
            if start is None:
                raise RuntimeError("The application sent no response.")
        except BaseException:  # above all a call that was cancelled or is out of time
            await self.__aexit__(None, None, None)
            raise
        self.status = start["status"]
        self.headers = dict(start.get("headers", ()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        while not self._pieces.empty():
            self._pieces.get_nowait()  # a sender that waits for room can end
        await asyncio.wait({self._task}, timeout=SHUTDOWN_GRACE_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def pieces(self) -> AsyncIterator[bytes]:
        while (message := await self._next()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                return

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def _next(self) -> Message | None:
        """The application's next message; None when it has ended. Raises what ended it."""
        getting = asyncio.ensure_future(self._pieces.get())
        try:
            await asyncio.wait({getting, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        self._task.result()
        return None

    async def _send(self, message: Message) -> None:
        if not self._left.is_set():
            await self._pieces.put(message)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}
