"""One proxied request: attempts at workers until one answers, and its answer on to the client's socket.

Nothing reaches the client before an attempt has succeeded, so another worker can be tried: retries, moves, hedges. When
a worker dies in the middle of a stream, another one continues it if the stream can be resumed; otherwise the stream
ends with an error event.
"""

import asyncio
import contextlib
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.cache_watch import CacheWatch
from bough.gateway.call import Call
from bough.gateway.clients import TokenBucket, take_from_all
from bough.gateway.dispatch import Dispatch
from bough.gateway.health import has_ended, nobody_listens
from bough.gateway.http_client import Upstream, describe, out_of_descriptors
from bough.gateway.metrics import GatewayMetrics
from bough.gateway.outlet import Outlet
from bough.gateway.pairing import PAIRED_PATHS, Pairing, paired_body
from bough.gateway.peek import ResponseFields, read_response_fields
from bough.gateway.relay import Relay
from bough.gateway.responses import NOT_IMPLEMENTED, AttemptFailedError, OpenStream, Response, read_response, secret_of
from bough.gateway.resume import CannotResumeError, ResumableText, WorkerFailedError
from bough.gateway.upstream_response import UpstreamResponse
from bough.gateway.worker import Lease, Worker, WorkerLostError
from bough.server.errors import HttpError

BUDGET_RESERVE = 100.0  # retries that may follow each other at once: a worker with many requests may die
BUDGET_FLOOR_PER_S = 10.0  # retries that are always allowed: a gateway with few requests may retry each of them
RESUME_HEADER = (b"X-Bough-Resume", b"1")
# Streams of these can be resumed; the header does not disturb a worker that does not know it.
RESUMABLE_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"})
RESPONSES = "/v1/responses"
MAX_STICKY = 100_000
POISONED = "The request is not tried on a third worker, because {}."
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


def pause_s(settings: GatewaySettings, retry: int, chance: float) -> float:
    """The pause before the `retry`-th retry, from 0: it grows, and `chance` (0 to 1) spreads requests that failed
    together."""
    # The exponent is bounded: beyond it any pause is the longest, and the power would overflow.
    grown_ms = settings.retry_initial_backoff_ms * settings.retry_backoff_multiplier ** min(retry, 200)
    jitter = 1.0 + settings.retry_jitter_factor * (2.0 * chance - 1.0)
    return min(grown_ms, settings.retry_max_backoff_ms) / 1000 * jitter


@dataclass(frozen=True, slots=True)
class Proxy:
    dispatch: Dispatch
    cache_watch: CacheWatch
    upstream: Upstream
    settings: GatewaySettings
    metrics: GatewayMetrics
    sticky: StickyResponses
    pairing: Pairing | None = None
    # A retry costs one token; requests and time earn tokens. When every worker fails, most requests give up.
    budget: TokenBucket = field(default_factory=lambda: TokenBucket(BUDGET_FLOOR_PER_S, BUDGET_RESERVE))

    async def answer(self, call: Call, outlet: Outlet) -> None:
        """Raises an `HttpError` only before anything was sent."""
        self.budget.add(self.settings.retry_budget_ratio)
        result = await self._first_response(call, call.body)
        if isinstance(result, Response):
            self._learn(call, result.fields)
            await outlet.whole(result)
        else:
            await self._relay(call, result, outlet)

    def _learn(self, call: Call, fields: ResponseFields | None) -> None:
        if fields is None:
            return
        if (counts := fields.prompt_tokens()) is not None:
            self.metrics.prompt_was(call, *counts)
        if call.path == RESPONSES and fields.name is not None and call.worker is not None:
            self.sticky.remember(fields.name, call.worker)

    # ---- attempts

    async def _first_response(self, call: Call, body: bytes) -> Response | OpenStream:
        """The first good response; without one, the last worker's error or the gateway's own."""
        retries = 0
        try:
            while True:
                try:
                    lease = self.dispatch.try_next(call) or await self.dispatch.wait(call)
                    if self.settings.hedge_after_secs is None or call.pinned is not None:
                        lease.owner = call.task
                        return await self._attempt(call, body, lease)
                    return await self._hedged(call, body, lease, self.settings.hedge_after_secs)
                except AttemptFailedError as failure:
                    if call.faults.poison is not None:
                        call.error = POISONED.format(call.faults.poison)
                        self.metrics.poisons[()] += 1
                        if failure.answered and not failure.gave_up:
                            return failure.final_response()
                        raise HttpError(500, call.error, "InternalServerError") from None  # a 502 invites a retry
                    if failure.moved:
                        call.moves += 1
                        self.metrics.moves[()] += 1
                        continue
                    call.error = failure.reason
                    hopeless = failure.status == NOT_IMPLEMENTED and not self.dispatch.has_untried(call)
                    if hopeless or not await self._pause(call, retries):
                        return failure.final_response()
                retries += 1
        finally:
            call.faults.settle()

    async def _pause(self, call: Call, retries: int) -> bool:
        """Waits before one more attempt; False if no retry is left."""
        if retries >= self.settings.retry_max_retries or take_from_all([self.budget], time.monotonic()):
            return False
        call.retries += 1
        self.metrics.retries[()] += 1
        await asyncio.sleep(pause_s(self.settings, retries, random.random()))
        return True

    async def _hedged(self, call: Call, body: bytes, lease: Lease, after_s: float) -> Response | OpenStream:
        """An attempt, and a second beside a slow first. The first good result counts."""
        running = {asyncio.create_task(self._attempt(call, body, lease))}
        try:
            done, _ = await asyncio.wait(running, timeout=after_s)
            if not done:
                other = self._other_lease(call)
                if other is not None:
                    running.add(asyncio.create_task(self._attempt(call, body, other)))
            return await _first_good(running)
        finally:
            await _drop(running)

    def _other_lease(self, call: Call) -> Lease | None:
        first = call.worker
        assert first is not None
        call.tried |= {first.id}
        lease = self.dispatch.try_lease(call)
        if lease is not None and lease.worker is first:
            lease.abandon()
            return None
        if lease is not None:
            call.hedges += 1
            self.metrics.hedges[()] += 1
        return lease

    async def _attempt(self, call: Call, body: bytes, lease: Lease) -> Response | OpenStream:
        worker, peek, path = lease.worker, call.peek, call.path
        call.attempts += 1
        if call.attempts > 1:
            call.faults.sent(worker)
        self.metrics.attempts[worker.url,] += 1
        if self.cache_watch.watching:
            self.cache_watch.sent(worker, path, call.body, peek.routing)
        headers = [*call.headers, RESUME_HEADER] if peek.streams and path in RESUMABLE_PATHS else call.headers
        response: UpstreamResponse | None = None
        prefill: Lease | None = None
        if self.pairing is not None and path in PAIRED_PATHS and peek.not_json is None:
            prefill = self.pairing.lease(call, lease)
            body = paired_body(body, prefill)
        if self.settings.attempt_timeout_secs is not None:
            lease.end_after(self.settings.attempt_timeout_secs)
        try:
            with lease:
                response = await self.upstream.send(worker, call.method, call.target, headers, body)
                result = await read_response(call, lease, response)
        except BaseException as error:
            if response is not None:
                response.close()
            failure = _failure_of(error)
            if failure is None:  # the client has left
                lease.abandon()
                if prefill is not None:
                    prefill.abandon()
                raise
            if prefill is not None and self.pairing is not None:
                failure = self.pairing.failed(call, prefill, failure)
            call.tried |= {worker.id}
            self.metrics.failures[worker.url, "moved" if failure.moved else str(failure.status)] += 1
            if failure.blames_worker and failure.answered:
                call.faults.answered(lease, failure.status, failure.reason)
            elif failure.blames_worker:
                lease.fail(failure.reason)
            else:
                lease.abandon()
                if failure.status == NOT_IMPLEMENTED:
                    call.faults.lacked(worker)
            await self._note_end(call, worker, error)
            raise failure from None
        call.worker = worker
        if prefill is not None:
            prefill.succeed()
        if isinstance(result, Response):
            response.close()
            lease.succeed()
        else:
            lease.prefilled()
        return result

    async def _note_end(self, call: Call, worker: Worker, error: BaseException) -> None:
        """Finds out whether the worker ended with the request."""
        if isinstance(error, WorkerLostError):
            ended = worker.ended
        elif _may_have_ended(error):
            ended = worker.ended or await has_ended(self.upstream, worker)
        else:
            return
        if ended:
            call.faults.ended(worker)

    # ---- streams

    async def _relay(self, call: Call, stream: OpenStream, outlet: Outlet) -> None:
        """Sends one stream, from as many workers as it takes."""
        events = stream.response.content_type == b"text/event-stream"
        await outlet.start(stream.headers, of_lines=not events)
        text = ResumableText(passes=not (events and call.path in RESUMABLE_PATHS))
        failures = 0  # workers in a row that failed without a token
        while True:
            had = len(text.output_ids)
            try:
                await self._copy(call, stream, text, outlet)
                stream.response.close()
                stream.lease.succeed()
                break
            except CannotResumeError as error:  # the worker is good for other requests
                stream.abandon()
                call.unable |= {stream.lease.worker.id}
                reason = str(error)
            except LOST as error:
                stream.response.close()
                stream.lease.fail(_reason(error))
                failures = 0 if len(text.output_ids) > had else failures + (not isinstance(error, WorkerLostError))
                reason = _reason(error)
                if len(text.output_ids) > had:
                    call.faults.progressed()
                await self._note_end(call, stream.lease.worker, error)
                if call.faults.poison is not None:
                    self.metrics.poisons[()] += 1
                    await outlet.broken(POISONED.format(call.faults.poison))
                    return
            except BaseException:  # the client has left
                stream.abandon()
                raise
            if not text.resumable or (failures and not await self._pause(call, failures - 1)):
                await outlet.broken(f"The worker was lost in the middle of the answer ({reason}).")
                return
            try:
                stream = await self._resumed(call, stream, text)
            except HttpError as error:
                await outlet.broken(f"The worker was lost ({reason}), and {error.failure.message}")
                return
        self._learn(call, _last_event(outlet.tail))
        await outlet.end()

    async def _copy(self, call: Call, stream: OpenStream, text: ResumableText, outlet: Outlet) -> None:
        """One worker's part of a stream, until its end."""
        lease, response, exchange = stream.lease, stream.response, outlet.exchange
        connection, write, lease.owner = exchange.connection, outlet.write, call.task
        if (key := lease.worker.api_key) is not None:
            outlet.secret = secret_of(key)
        if call.path == RESPONSES:
            self._learn(call, _last_event(stream.first))

        def pass_on(chunk: bytes) -> bool:
            if connection.drained is not None:  # the client does not keep up
                return False
            lease.heard = True
            if text.annotated is not False or not text.delivered:  # else it passes as it is
                chunk = text.feed(chunk)
                if lease.counted is None or not lease.resumable:
                    lease.resumable = text.resumable
                    if text.delivered and lease.counted is None:
                        lease.prove()
            if chunk:
                write(chunk)
            return True

        relay = Relay(stream, text, outlet)
        chunk, response.tap = stream.first, pass_on
        try:
            while chunk:
                await exchange.until_writable()
                pass_on(chunk)
                with lease:
                    chunk = await response.read_some()
        finally:
            response.tap = None
            relay.end()
        # Where only the end of the connection ends the stream, as in HTTP/1.0, a worker that died looks the same.
        by_connection = call.path in RESUMABLE_PATHS and response.ends_with_connection
        if rest := text.rest(outlet.tail if by_connection else None):
            outlet.write(rest)

    async def _resumed(self, call: Call, lost: OpenStream, text: ResumableText) -> OpenStream:
        call.failovers += 1
        self.metrics.failovers[()] += 1
        call.tried = frozenset({lost.lease.worker.id})
        text.restart()
        result = await self._first_response(call, text.body(call.body))
        if isinstance(result, Response):
            raise HttpError(502, "no other could go on with the answer.", "BadGatewayError")
        return result


def _failure_of(error: BaseException) -> AttemptFailedError | None:
    """None for what is not the worker's doing."""
    if isinstance(error, WorkerLostError):
        return AttemptFailedError("its worker is gone", 503, moved=True)
    if isinstance(error, TimeoutError):
        return AttemptFailedError("the worker took too long (--attempt-timeout-secs)", 504)
    if out_of_descriptors(error):
        return AttemptFailedError("the gateway has no file descriptor left for a connection (ulimit -n)", 503)
    if isinstance(error, OSError):
        return AttemptFailedError(f"the connection failed: {describe(error)}", 502)
    return error if isinstance(error, AttemptFailedError) else None


def _may_have_ended(error: BaseException) -> bool:
    """Whether a worker that had the request broke the connection or gave the request up."""
    if isinstance(error, OSError):
        return not isinstance(error, TimeoutError) and not nobody_listens(error)
    return isinstance(error, WorkerFailedError) or (isinstance(error, AttemptFailedError) and error.gave_up)


Tried = asyncio.Task[Response | OpenStream]


async def _first_good(running: set[Tried]) -> Response | OpenStream:
    pending = set(running)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                running.discard(task)
                return task.result()
        if not pending:
            return done.pop().result()


async def _drop(running: set[Tried]) -> None:
    """Cancels the other attempts; one that has just opened a stream gives it back."""
    for task in running:
        task.cancel()
    for task in running:
        with contextlib.suppress(asyncio.CancelledError, AttemptFailedError):
            result = await task
            if isinstance(result, OpenStream):
                result.abandon()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return "the connection broke"
    return str(error) or "it failed its health checks"


def _last_event(tail: bytes) -> ResponseFields | None:
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data: {"):
            return read_response_fields(line[6:])
    return None
