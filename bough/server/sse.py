"""Server-sent events: a stream of prepared bytes to one client.

Each event is awaited into the socket before the next is pulled, so what waits for a slow client is bounded by the
socket's buffer and its answers coalesce. Nothing is sent before the first event, so that a request which is refused at
once gets a proper status; when the first takes long (a long prefill) the stream is opened and comments keep it alive.
A client that leaves ends the generator, and with it the requests behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bough.server.endpoint import EVENTS, ClientGoneError
from bough.server.errors import Failure, failure_of
from bough.server.responses import encode_json

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event of JSON that is already encoded."""
    return b"data: %b\n\n" % data


def json_event(content: object) -> bytes:
    return event(encode_json(content))


class EventStream(Response):
    """Sends what `events` yields, as it comes.

    `on_failure` makes the last bytes of a stream that breaks after it has begun. `headers` may be a function: it is
    called when the first event is there, for headers that tell of it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_failure: Callable[[Failure], bytes],
        *,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        media_type: str = EVENTS,
        keep_alive: bytes = KEEP_ALIVE,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_failure = on_failure
        self._more_headers = headers
        self._content_type = media_type
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._begun = False
        self._sent = False  # something went out since the last look
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(self._watch(receive, send))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, watch):
                task.cancel()
            await asyncio.gather(pump, watch, return_exceptions=True)
        if not pump.cancelled():
            pump.result()
        else:
            watch.result()

    async def _pump(self, send: Send) -> None:
        """Sends each event. An error before the first byte is the caller's; a later one ends the stream."""
        async with contextlib.aclosing(self._events) as events:
            try:
                async for chunk in events:
                    await self._send(send, chunk)
            except Exception as error:
                if not self._begun:
                    raise
                await self._send(send, self._on_failure(failure_of(error)))
        await self._begin(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, chunk: bytes) -> None:
        async with self._sending:
            await self._begin(send)
            self._sent = True
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _begin(self, send: Send) -> None:
        if self._begun:
            return
        self._begun = True
        more = self._more_headers() if callable(self._more_headers) else self._more_headers
        self.init_headers(
            {
                "content-type": self._content_type,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",  # proxies must pass events on as they come
                **(more or {}),
            }
        )
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Until the client leaves: comments where nothing else was sent for a while."""
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    message = await receive()
            except TimeoutError:
                if not self._sent and not self._sending.locked():
                    await self._send(send, self._keep_alive)
                self._sent = False
                continue
            if message["type"] == "http.disconnect":
                raise ClientGoneError
