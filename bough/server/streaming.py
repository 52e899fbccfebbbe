"""Responses that grow: server-sent events, the writers that make them, and streams that resume on another server.

Each event is awaited into the socket before the next is pulled, so a slow client is bounded by its socket's buffer.
Nothing is sent before the first event, so that a refused request gets a proper status; when that takes long, comments
keep the connection alive. A client that disconnects ends the requests behind its stream.

A client that sends `X-Bough-Resume: 1` (a gateway) finds comments in front of the events: `: seed N` once,
`: ids 12,34` wherever tokens were delivered, and `: events N` where several events belong together. With these it can
ask any server of the same model, in the body's `resume`, for what follows.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bough.client.handle import EngineClient, raise_if_refused
from bough.client.inputs import Inputs, Prompt, Resumption, token_array
from bough.client.outputs import Piece, RequestOutput, Timings
from bough.core.errors import RequestError
from bough.core.sampling_params import INT64_MAX, require_few
from bough.server.endpoint import EVENTS, encode_json, json_response
from bough.server.errors import Failure, failure_of, in_client_names
from bough.server.http import race

T = TypeVar("T")

EMPTY_IDS = b'"token_ids":[]'


class PreparedChunk:
    def __init__(self, chunk: bytes, text_field: str) -> None:
        """`chunk` is ready to be sent, with empty text and, to show ids, an empty list of them."""
        # Inside JSON strings quotes are escaped, so the first match is the field itself, whatever the model's name.
        place = b'"%b":""' % text_field.encode()
        before, found, after = chunk.partition(place)
        assert found, f"the chunk has no empty {text_field}"
        self._before = before + place[:-2]
        middle, found, end = after.partition(EMPTY_IDS)
        self._shows_ids = bool(found)
        self._middle = middle + EMPTY_IDS[:-2] if found else after
        self._end = end

    def fill(self, text: str, ids: list[int]) -> bytes:
        if self._shows_ids:
            return b"".join((self._before, encode_json(text), self._middle, encode_json(ids), self._end))
        return b"".join((self._before, encode_json(text), self._middle))


KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def json_event(content: object) -> bytes:
    return b"data: %b\n\n" % encode_json(content)


class EventStream(Response):
    """Sends what `events` yields, as it comes.

    `on_failure` makes the last bytes of a stream that breaks after it has begun. `headers` is called when the first
    event is there, for headers that depend on it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_failure: Callable[[Failure], bytes],
        *,
        headers: Callable[[], Mapping[str, str]] = dict,
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
        self._sent = False  # something was sent since the last check
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(self._watch(receive, send))
        await race(pump, watch)
        (watch if pump.cancelled() else pump).result()

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
        self.init_headers(
            {
                "content-type": self._content_type,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",  # proxies must pass events on as they come
                **self._more_headers(),
            }
        )
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Sends keep-alive comments where nothing else was sent for a while; raises when the client disconnects."""
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
                raise ClientDisconnect


def timing_headers(answers: Sequence[RequestOutput]) -> dict[str, str]:
    return {"Server-Timing": slowest_timings(answers).to_header(finished=all(answer.done for answer in answers))}


def slowest_timings(answers: Sequence[RequestOutput]) -> Timings:
    """Of the answer that took longest: that is what the client waited for."""
    return max((answer.timings for answer in answers), key=lambda timings: timings.total_s)


def warnings_of(answers: Sequence[RequestOutput]) -> list[str] | UnsetType:
    """What of the requests has no effect; unset where all has. The server's own warnings have the client's names."""
    parts = [(answer.prompt.warnings, answer.warnings) for answer in answers]
    texts = [text for own, told in parts for text in (*own, *map(in_client_names, told[len(own) :]))]
    return list(dict.fromkeys(texts)) or UNSET


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Call it when the body has been read: the next message can then only be the disconnect."""

    async def until_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    await race(task, asyncio.ensure_future(until_disconnect()))
    if task.cancelled():
        raise ClientDisconnect
    return task.result()


def named_event(event: Mapping[str, Any]) -> bytes:
    """An event of the protocols that name each of theirs, in its JSON and beside it."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


class Writer(ABC):
    """Writes the response to one call: the bytes of its stream, or its JSON."""

    media_type = EVENTS
    keep_alive = KEEP_ALIVE
    timed: bool | None = None  # whether the client asked for timings
    opening_events: int | None = None  # in front of the first token; None: the stream cannot be resumed
    shows_refusals = False  # an answer that the engine refused is written; else it is an error

    @abstractmethod
    def whole(self, answers: list[RequestOutput]) -> Any:
        """The JSON of a response that is not streamed."""

    @abstractmethod
    def chunk(self, piece: Piece) -> bytes:
        """What a piece adds; nothing, if there is nothing to show."""

    def end(self) -> bytes:
        return b""

    @abstractmethod
    def failure(self, failure: Failure) -> bytes:
        """The last bytes of a stream that breaks after it has begun."""


async def respond(
    client: EngineClient, request: Request, inputs: Inputs, writer: Writer, *, stream: bool | None
) -> Response:
    """The response, whole or as a stream; a stream with the comments that its client asked for."""
    if stream:
        wished = request.headers.get(RESUME_HEADER) == "1" and writer.opening_events is not None
        return stream_answers(client, inputs, writer, comments=wished and not inputs.batched)
    answers = await while_connected(request, client.answers(inputs))
    for answer in () if writer.shows_refusals else answers:
        raise_if_refused(answer)
    return json_response(writer.whole(answers), headers=timing_headers(answers) if writer.timed else None)


def stream_answers(
    client: EngineClient,
    inputs: Inputs,
    writer: Writer,
    *,
    comments: bool = False,
    on_close: Callable[[], None] = lambda: None,
) -> EventStream:
    """The response that streams `inputs`' answers. `comments`: with those that let it be resumed. `on_close` is called
    once it is over, also after an error or a disconnect."""
    seen: list[RequestOutput] = []
    announced = Comments(inputs.prompts[0], writer.opening_events or 0) if comments else None

    async def events() -> AsyncGenerator[bytes, None]:
        pieces = client.pieces(inputs, stream=True)
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if not seen:
                        seen.append(piece.answer)
                    if piece.finish is not None and not writer.shows_refusals:
                        raise_if_refused(piece.answer)
                    chunk = writer.chunk(piece)
                    if announced is not None:
                        # One group with the last piece, so that a stream is never left without its end alone.
                        chunk = announced.before(chunk if piece.finish is None else chunk + writer.end(), piece.ids)
                    if chunk:
                        yield chunk
            if announced is None and (last := writer.end()):
                yield last
        finally:
            on_close()

    def headers() -> Mapping[str, str]:
        return timing_headers(seen) if writer.timed and seen else {}

    return EventStream(
        events(), writer.failure, headers=headers, media_type=writer.media_type, keep_alive=writer.keep_alive
    )


RESUME_HEADER = "x-bough-resume"
EVENT_END = b"\n\n"


class Resume(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Goes on with a stream that broke: `output_ids` are the tokens that were delivered (those of all `: ids` comments,
    in order), `seed` is the value of `: seed`, `id` and `created` are those of the broken stream."""

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
    require_few(resume.output_ids, "resume.output_ids")
    if any(isinstance(entry, list) for entry in resume.output_ids):
        text = "resume.output_ids must be the token ids of one answer; streams of several cannot be resumed."
        raise RequestError(text, field="resume.output_ids")
    if resume.seed is not None and not -INT64_MAX - 1 <= resume.seed <= INT64_MAX:
        text = f"resume.seed must be a 64-bit whole number (-2**63 to 2**63 - 1), got {resume.seed}."
        raise RequestError(text, field="resume.seed")
    return {"resumption": Resumption(token_array(resume.output_ids, "resume.output_ids"), resume.seed)}


class Comments:
    """What stands in front of a stream's events. Tokens that show nothing are announced with the next event."""

    def __init__(self, prompt: Prompt, opening_events: int) -> None:
        self._ids: list[int] = []  # not announced yet
        self._first = f": seed {prompt.seed}\n".encode()
        # A stream that was itself resumed has sent its opening events before.
        self._opening_events = opening_events if prompt.resumption is None else 0

    def before(self, events: bytes, ids: list[int]) -> bytes:
        self._ids += ids
        if not events:
            return b""
        count = events.count(EVENT_END)  # JSON has no line breaks
        parts = [self._first, b": events %d\n" % count if count > 1 else b""]
        for _ in range(self._opening_events):
            opening, end, events = events.partition(EVENT_END)
            parts += [opening, end]
        if self._ids:
            parts.append(b": ids %b\n" % ",".join(map(str, self._ids)).encode())
        self._first, self._ids, self._opening_events = b"", [], 0
        return b"".join([*parts, events])
