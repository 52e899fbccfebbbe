"""Answers as they grow, in any protocol: what the engine's client brings, a writer turns into bytes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

from bough.client.answer import Answer
from bough.client.handle import EngineClient
from bough.client.inputs import Inputs
from bough.client.piece import Piece
from bough.server.errors import Failure
from bough.server.responses import encode_json
from bough.server.sse import EventStream
from bough.server.timing import timing_headers


class NamedEvent(Protocol):
    """An event of the protocols that name each of theirs, in its JSON and beside it."""

    @property
    def type(self) -> str: ...


def named_event(event: NamedEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), encode_json(event))


class Writer(Protocol):
    """Makes the bytes of one stream."""

    def chunk(self, piece: Piece) -> bytes:
        """What a piece adds; nothing, if there is nothing to show."""
        ...

    def end(self) -> bytes:
        """After the last piece."""
        ...


def stream_answers(
    client: EngineClient,
    inputs: Inputs,
    writer: Writer,
    on_failure: Callable[[Failure], bytes],
    *,
    timed: bool,
    on_close: Callable[[], None] = lambda: None,
    **form: Any,
) -> EventStream:
    """The response that streams `inputs`' answers. `on_close` is called once it is over, be it by an error or by the
    client's leaving. `form` are `EventStream`'s options for streams that are not SSE."""
    seen: list[Answer] = []

    async def events() -> AsyncGenerator[bytes, None]:
        pieces = client.pieces(inputs, stream=True)
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if not seen:
                        seen.append(piece.answer)
                    if chunk := writer.chunk(piece):
                        yield chunk
            if last := writer.end():
                yield last
        finally:
            on_close()

    def headers() -> Mapping[str, str]:
        return timing_headers(seen) if timed and seen else {}

    return EventStream(events(), on_failure, headers=headers, **form)
