"""Tries a request on workers until one answers: retries, moves, hedges.

Nothing reaches the client before an attempt has succeeded, so another worker can be tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.cache_watch import CacheWatch
from bough.gateway.call import Call
from bough.gateway.clients import TokenBucket, take_from_all
from bough.gateway.dispatch import Dispatch
from bough.gateway.http_client import Upstream, describe
from bough.gateway.metrics import GatewayMetrics
from bough.gateway.policy_table import PolicyTable
from bough.gateway.responses import AttemptFailedError, OpenStream, Response, read_response
from bough.gateway.upstream_response import UpstreamResponse
from bough.gateway.worker import Lease, SilenceTimer, Worker, WorkerLostError

BUDGET_RESERVE = 100.0  # retries that may follow each other at once: a worker with many requests may die
BUDGET_FLOOR_PER_S = 10.0  # retries that are always allowed: a gateway with few requests may retry each of them
RESUME_HEADER = (b"X-Bough-Resume", b"1")
# Streams of these can be resumed; the header does not disturb a worker that does not know it.
RESUMABLE_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"})


class RetryBudget:
    """A retry costs one token; requests and time earn tokens. When every worker fails, most requests give up."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._bucket = TokenBucket(BUDGET_FLOOR_PER_S, BUDGET_RESERVE)

    def earn(self) -> None:
        self._bucket.add(self._ratio)

    def spend(self, now_s: float) -> bool:
        return take_from_all([self._bucket], now_s) == 0.0


def pause_s(settings: GatewaySettings, retry: int, chance: float) -> float:
    """The pause before the `retry`-th retry, from 0: it grows, and `chance` (0 to 1) spreads requests that failed
    together."""
    # The exponent is bounded: beyond it any pause is the longest, and the power would overflow.
    grown_ms = settings.retry_initial_backoff_ms * settings.retry_backoff_multiplier ** min(retry, 200)
    jitter = 1.0 + settings.retry_jitter_factor * (2.0 * chance - 1.0)
    return min(grown_ms, settings.retry_max_backoff_ms) / 1000 * jitter


@dataclass(frozen=True, slots=True)
class Attempts:
    dispatch: Dispatch
    policies: PolicyTable
    cache_watch: CacheWatch
    upstream: Upstream
    settings: GatewaySettings
    budget: RetryBudget
    metrics: GatewayMetrics

    async def answer(self, call: Call, body: bytes) -> Response | OpenStream:
        """The first good response; without one, the last worker's error or the gateway's own."""
        retries = 0
        while True:
            try:
                return await self._hedged(call, body)
            except AttemptFailedError as failure:
                if failure.moved:
                    call.moves += 1
                    self.metrics.moves.inc()
                    continue
                call.error = failure.reason
                hopeless = failure.settled and not self.dispatch.has_untried(call)
                if hopeless or not await self.pause(call, retries):
                    return failure.final_response()
            retries += 1

    async def pause(self, call: Call, retries: int) -> bool:
        """Waits before one more attempt; False if no retry is left."""
        if retries >= self.settings.retry_max_retries or not self.budget.spend(time.monotonic()):
            return False
        call.retries += 1
        self.metrics.retries.inc()
        await asyncio.sleep(pause_s(self.settings, retries, random.random()))
        return True

    # ---- hedging

    async def _hedged(self, call: Call, body: bytes) -> Response | OpenStream:
        """One attempt; with `--hedge-after-secs` a second beside a slow first. The first good result counts."""
        after_s = self.settings.hedge_after_secs
        if after_s is None or call.pinned is not None:
            return await self._attempt(call, body, await self.dispatch.lease(call))
        first = asyncio.create_task(self._attempt(call, body, await self.dispatch.lease(call)))
        running = {first}
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
        call.tried.add(first.id)
        lease = self.dispatch.try_lease(call)
        if lease is not None and lease.worker is first:
            lease.worker.breaker.abandoned()
            lease.release()
            return None
        if lease is not None:
            call.hedges += 1
            self.metrics.hedges.inc()
        return lease

    # ---- one attempt

    def silence(self, worker: Worker) -> SilenceTimer:
        return SilenceTimer(worker, self.settings.health_check_timeout_secs)

    async def _attempt(self, call: Call, body: bytes, lease: Lease) -> Response | OpenStream:
        worker = lease.worker
        call.attempts += 1
        self.metrics.attempted(worker)
        self.policies.of(call.peek.model).routed(worker.id, call.peek.routing)
        self.cache_watch.sent(worker, call.path, call.body, call.peek.routing)
        silence = self.silence(worker)
        try:
            return await self._exchange(call, body, lease)
        except AttemptFailedError as failure:
            self._note(call, lease, failure)
            raise
        except BaseException:  # the client has left
            worker.breaker.abandoned()
            lease.release()
            raise
        finally:
            silence.cancel()

    async def _exchange(self, call: Call, body: bytes, lease: Lease) -> Response | OpenStream:
        response: UpstreamResponse | None = None
        kept = False
        try:
            async with lease.bounded(self.settings.attempt_timeout_secs):
                headers = _stream_headers(call) if call.peek.streams else call.headers
                response = await self.upstream.send(lease.worker, call.method, call.target, headers, body)
                result = await read_response(call, lease, response)
            kept = isinstance(result, OpenStream)
            call.worker = lease.worker
            if isinstance(result, Response):
                lease.worker.breaker.succeeded(time.monotonic())
                lease.release()
            return result
        except WorkerLostError:
            raise AttemptFailedError("its worker is gone", 503, moved=True) from None
        except TimeoutError:
            raise AttemptFailedError("the worker took too long (--attempt-timeout-secs)", 504) from None
        except OSError as error:
            raise AttemptFailedError(f"the connection failed: {describe(error)}", 502) from None
        finally:
            if response is not None and not kept:
                response.close()

    def _note(self, call: Call, lease: Lease, failure: AttemptFailedError) -> None:
        worker = lease.worker
        call.tried.add(worker.id)
        self.metrics.attempt_failed(worker, failure)
        if failure.blames_worker:
            worker.last_error = failure.reason
            worker.breaker.failed(time.monotonic())
            worker.suspect()
        else:
            worker.breaker.abandoned()
        lease.release()


def _stream_headers(call: Call) -> list[tuple[bytes, bytes]]:
    return [*call.headers, RESUME_HEADER] if call.path in RESUMABLE_PATHS else list(call.headers)


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
