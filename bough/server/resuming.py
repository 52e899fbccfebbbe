"""Streams that can go on elsewhere when this server dies: what is announced for that, and how one is taken over.

A client that sends `X-Bough-Resume: 1` (a gateway) finds comments in front of the events of a stream: `: seed N` once,
`: ids 12,34` wherever tokens were delivered, and `: events N` where several events belong together and must be passed
on together or not at all. With these it can ask any server of the same model, in the body's `resume`, for what follows.
Nothing here makes text or events; that a resumed answer begins behind its beginning is the writers' matter.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from bough.client.inputs import Inputs, token_array
from bough.client.piece import Piece
from bough.client.resumption import Resumption
from bough.core.errors import RequestError
from bough.core.sampling_params import INT64_MAX
from bough.server.streaming import Writer

HEADER = "x-bough-resume"
EVENT_END = b"\n\n"


class Resume(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Goes on with a stream that broke: `output_ids` are the tokens that were delivered (those of all `: ids` comments,
    in order), `seed` is what `: seed` said, `id` and `created` are those of the broken stream."""

    output_ids: list[int | list[int]]
    id: str | None = None
    created: int | None = None
    seed: int | None = None


def read_resumption(resume: Resume | None, stream: bool | None) -> dict[str, Any]:
    """What `InputReader.read` is to be given for it; nothing, if the request is an ordinary one."""
    if resume is None:
        return {}
    if not stream:
        raise RequestError("resume goes on with a stream; set stream to true.", field="resume")
    if any(isinstance(entry, list) for entry in resume.output_ids):
        raise RequestError(
            "resume.output_ids must be the token ids of one answer; streams of several cannot be resumed.",
            field="resume.output_ids",
        )
    if resume.seed is not None and not -INT64_MAX - 1 <= resume.seed <= INT64_MAX:
        raise RequestError(
            f"resume.seed must be a 64-bit whole number (-2**63 to 2**63 - 1), got {resume.seed}.", field="resume.seed"
        )
    return {"resumption": Resumption(token_array(resume.output_ids, "resume.output_ids"), resume.seed)}


def resumable(request: Request, inputs: Inputs, writer: Writer, *, opening_events: int = 0) -> Writer:
    """The writer, with the announcements that the request asked for. Streams of several answers have none.
    `opening_events` is how many events stand in front of the first token, unless the stream was itself resumed."""
    if request.headers.get(HEADER) != "1" or inputs.batched:
        return writer
    (prompt,) = inputs.prompts
    return AnnouncingWriter(writer, prompt.seed, opening_events if prompt.resumption is None else 0)


class AnnouncingWriter:
    """Puts comments in front of another writer's events. Tokens that show nothing are announced with the next event;
    the last piece and the end of the stream are one group, so that a stream is never left without its end alone."""

    def __init__(self, writer: Writer, seed: int, opening_events: int) -> None:
        self._writer = writer
        self._ids: list[int] = []  # not told yet
        self._first = f": seed {seed}\n".encode()
        self._opening_events = opening_events

    def chunk(self, piece: Piece) -> bytes:
        self._ids += piece.ids
        events = self._writer.chunk(piece)
        if piece.finish is not None:
            events += self._writer.end()
        return self._announced(events) if events else b""

    def end(self) -> bytes:
        return b""  # it went with the last piece

    def _announced(self, events: bytes) -> bytes:
        count = events.count(EVENT_END)  # JSON has no line breaks
        parts = [self._first, b": events %d\n" % count if count > 1 else b""]
        for _ in range(self._opening_events):
            opening, end, events = events.partition(EVENT_END)
            parts += [opening, end]
        if self._ids:
            parts.append(b": ids %b\n" % ",".join(map(str, self._ids)).encode())
        self._first, self._ids, self._opening_events = b"", [], 0
        return b"".join([*parts, events])
