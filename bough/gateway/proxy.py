"""From a worker's response to the client's socket.

When a worker dies in the middle of a stream, another one continues it if the stream can be resumed; otherwise the
stream ends with an error event.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from bough.gateway.attempts import RESUMABLE_PATHS, Attempts
from bough.gateway.call import Call
from bough.gateway.outlet import Outlet
from bough.gateway.peek import ResponseFields, read_response_fields
from bough.gateway.responses import OpenStream, Response, scrubbed
from bough.gateway.resume import CannotResumeError, ResumableText, WorkerFailedError
from bough.gateway.upstream_response import ReadInterruptedError
from bough.gateway.worker import Worker, WorkerLostError
from bough.server.errors import HttpError

RESPONSES = "/v1/responses"
MAX_STICKY = 100_000
EVENT_STREAM = "text/event-stream"
# What ends a worker's part of a stream before its time, by the worker's fault.
LOST = (WorkerLostError, WorkerFailedError, ValueError, OSError)


class StickyResponses:
    """Which worker holds a stored response of `/v1/responses`."""

    def __init__(self) -> None:
        self._workers: OrderedDict[str, Worker] = OrderedDict()  # by the response's id, the latest ones

    def remember(self, name: str, worker: Worker) -> None:
        self._workers[name] = worker
        self._workers.move_to_end(name)
        while len(self._workers) > MAX_STICKY:
            self._workers.popitem(last=False)

    def find(self, name: str) -> Worker | None:
        worker = self._workers.get(name)
        return None if worker is None or worker.removed else worker


class StreamBrokenError(Exception):
    """The stream cannot continue, and the client has a part of it."""


@dataclass(frozen=True, slots=True)
class Proxy:
    attempts: Attempts
    sticky: StickyResponses

    async def answer(self, call: Call, outlet: Outlet) -> None:
        """Raises an `HttpError` only before anything was sent."""
        result = await self.attempts.answer(call, call.body)
        if isinstance(result, Response):
            self._learn(call, result.fields)
            await outlet.whole(result)
        else:
            await self._relay(call, result, outlet)

    def _learn(self, call: Call, fields: ResponseFields | None) -> None:
        if fields is None:
            return
        counts = fields.prompt_tokens()
        if counts is not None:
            self.attempts.metrics.prompt_was(call, *counts)
        if call.path == RESPONSES and fields.name is not None and call.worker is not None:
            self.sticky.remember(fields.name, call.worker)

    # ---- streams

    async def _relay(self, call: Call, stream: OpenStream, outlet: Outlet) -> None:
        await outlet.start(stream.headers)
        try:
            async with contextlib.aclosing(self._pieces(call, stream)) as pieces:
                async for piece in pieces:
                    if piece:
                        await outlet.piece(piece)
        except StreamBrokenError as error:
            await outlet.broken(str(error))
            return
        self._learn(call, _last_event(outlet.tail))
        await outlet.end()

    async def _pieces(self, call: Call, stream: OpenStream) -> AsyncGenerator[bytes, None]:
        """The bytes of one stream, from as many workers as it takes."""
        text = ResumableText(passes=not _can_resume(call, stream))
        seen_name = call.path != RESPONSES
        failures = 0  # workers in a row that failed without a token
        while True:
            had = len(text.output_ids)
            try:
                with _settled(stream):
                    async with contextlib.aclosing(self._read(stream)) as chunks:
                        async for chunk in chunks:
                            piece = text.feed(chunk)
                            stream.lease.resumable = text.resumable
                            if text.delivered:
                                stream.prove()
                            if not seen_name:
                                seen_name = True
                                self._learn(call, _last_event(piece))
                            yield piece
                    rest = text.rest(cut_off=not text.resumable and _ends_with_connection(call, stream))
                yield rest
                return
            except CannotResumeError as error:
                call.unable.add(stream.lease.worker.id)
                reason = str(error)
            except LOST as error:
                failures = 0 if len(text.output_ids) > had else failures + (not isinstance(error, WorkerLostError))
                reason = _reason(error)
            if not text.resumable or (failures and not await self.attempts.pause(call, failures - 1)):
                raise StreamBrokenError(f"The worker was lost in the middle of the answer ({reason}).")
            stream = await self._resumed(call, stream, text, reason)

    async def _read(self, stream: OpenStream) -> AsyncGenerator[bytes, None]:
        worker = stream.lease.worker
        stream.lease.interrupt = stream.response.interrupt
        silence = self.attempts.silence(worker)
        chunk = stream.first
        try:
            while chunk:
                yield scrubbed(chunk, worker.api_key)
                chunk = await _next_chunk(stream)
                silence.heard()
        finally:
            silence.cancel()

    async def _resumed(self, call: Call, lost: OpenStream, text: ResumableText, reason: str) -> OpenStream:
        call.failovers += 1
        self.attempts.metrics.failovers.inc()
        call.tried = {lost.lease.worker.id}
        text.restart()
        try:
            result = await self.attempts.answer(call, text.body(call.body))
        except HttpError as error:
            raise StreamBrokenError(f"The worker was lost ({reason}), and {error.failure.message}") from None
        if isinstance(result, Response):
            raise StreamBrokenError(f"The worker was lost ({reason}), and no other could go on with the answer.")
        return result


async def _next_chunk(stream: OpenStream) -> bytes:
    """Reads on. A scope is only needed once the worker is considered dead; without one, a chunk costs less."""
    if not stream.lease.called_back:
        with contextlib.suppress(ReadInterruptedError):
            return await stream.response.read_some()
    async with stream.lease.bounded(None):
        return await stream.response.read_some()


@contextlib.contextmanager
def _settled(stream: OpenStream) -> Iterator[None]:
    """Ends one worker's part of a stream, and reports to its breaker how the worker did."""
    try:
        yield
    except LOST as error:
        stream.fail(_reason(error))
        raise
    except BaseException:  # the client has left, or the worker is good for other requests
        stream.abandon()
        raise
    stream.succeed()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return "the connection broke"
    return str(error) or "it failed its health checks"


def _can_resume(call: Call, stream: OpenStream) -> bool:
    return call.path in RESUMABLE_PATHS and stream.response.content_type == EVENT_STREAM


def _ends_with_connection(call: Call, stream: OpenStream) -> bool:
    """Whether only the end of the connection ends the stream, as in HTTP/1.0: a worker that died looks the same."""
    return call.path in RESUMABLE_PATHS and stream.response.ends_with_connection


def _last_event(tail: bytes) -> ResponseFields | None:
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data: {"):
            return read_response_fields(line[6:])
    return None
