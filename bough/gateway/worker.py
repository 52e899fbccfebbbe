"""One engine behind the gateway: its identity, its state, and its requests.

A `Lease` is one attempt of a request at a worker; while held it counts as load, and the worker can call it back.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from weakref import WeakSet

from bough.gateway.breaker import Breaker

SILENCE_LIMIT_S = 2.0  # after which a stream that cannot be resumed is taken for dead with its worker


class WorkerState(StrEnum):
    STARTING = "starting"  # has not passed its checks yet
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"  # was in rotation and failed its checks
    DRAINING = "draining"  # gets nothing more; what it has may finish: it is done when its load is 0
    REMOVED = "removed"


def worker_id(url: str) -> str:
    """The same for one address in every gateway and process, and safe in a URL."""
    return hashlib.sha256(url.encode()).hexdigest()[:12]


@dataclass(slots=True)
class Capabilities:
    models: tuple[str, ...] = ()  # empty: it did not say, and is taken for any
    capacity: int | None = None  # requests that it runs at once
    version: str | None = None
    kv_events_config: str | None = None  # how it publishes what its cache holds: JSON, as its flag has it


class WorkerLostError(Exception):
    """The attempt was called back: its worker is gone or failed its checks."""


class Moved:
    """Requests that came to a worker after another had ended with them. They are gone with their clients."""

    def __init__(self) -> None:
        self.requests: WeakSet[object] = WeakSet()
        self.ended = False  # this worker has ended, too


@dataclass(eq=False, slots=True)
class Worker:
    """`suspect` asks the health checker for an immediate check."""

    url: str
    breaker: Breaker
    api_key: str | None = None
    source: str = "api"
    limit: int | None = None  # requests at once that the gateway sends there
    bootstrap_port: int | None = None  # where a prefill engine meets decode engines; other engines have none
    capabilities: Capabilities = field(default_factory=Capabilities)
    reported_load: float = 0.0
    other_load: float = 0.0  # of the reported load, what this gateway process has not sent
    prefill_tokens: float = 0.0  # of the leases without a first token
    speed: float | None = None  # prompt tokens that it computes in a second
    in_rotation: bool = False
    ever_healthy: bool = False
    ended: bool = False  # its process is gone
    moved: Moved = field(default_factory=Moved)
    draining: bool = False
    removed: bool = False
    expected_back: bool = False  # the gateway itself is starting it
    last_error: str | None = None
    pid: int | None = None  # of its process, if the gateway has started it
    restarts: int = 0
    suspect: Callable[[], None] = lambda: None
    id: str = field(init=False)
    leases: set[Lease] = field(default_factory=set)
    load: int = 0  # how many these are

    def __post_init__(self) -> None:
        self.id = worker_id(self.url)

    @property
    def state(self) -> WorkerState:
        if self.removed:
            return WorkerState.REMOVED
        if self.draining:
            return WorkerState.DRAINING
        if self.in_rotation:
            return WorkerState.HEALTHY
        return WorkerState.UNHEALTHY if self.ever_healthy else WorkerState.STARTING

    @property
    def available(self) -> bool:
        return self.in_rotation and not self.draining and not self.removed

    def admits(self, now_s: float) -> bool:
        """Whether it has room, and its breaker lets a request pass."""
        return (self.limit is None or self.load < self.limit) and self.breaker.admits(now_s)

    def serves(self, model: str | None) -> bool:
        """A healthy worker that does not report its models may have any."""
        models = self.capabilities.models
        return model is None or model in models or (self.ever_healthy and not models)

    def note_report(self, load: float, speed: float | None, own_before: int) -> None:
        """The load that the worker reports, which was asked for while this process had `own_before` requests there."""
        self.reported_load, self.speed = load, speed
        self.other_load = max(0.0, load - max(own_before, self.load))

    def look_for_silence(self, now_s: float, after_s: float) -> None:
        """Asks for a health check once for each silence of `after_s` in an attempt, and ends those that were left to a
        dead worker."""
        for lease in self.leases:
            if lease.heard:
                lease.heard, lease.silent_since_s = False, now_s
            elif lease.called_back and not self.in_rotation:
                if now_s - lease.silent_since_s >= SILENCE_LIMIT_S:
                    lease.end_wait()
            elif now_s - lease.silent_since_s >= after_s:
                lease.silent_since_s = math.inf
                self.suspect()


class Scope:
    """What its task waits for inside of it can be ended from outside, with a `TimeoutError`: as `asyncio.timeout`, but
    without a timer and the turns of the loop that each takes."""

    owner: asyncio.Task[None] | None = None  # whose waits it is for, where that is known: to find it takes long
    _task: asyncio.Task[Any] | None = None
    _timer: asyncio.TimerHandle | None = None
    _ended = False
    _fault: type[Exception] = TimeoutError

    def __enter__(self) -> None:
        self._task, self._ended = self.owner or asyncio.current_task(), False

    def end_wait(self) -> None:
        """Not for the task itself."""
        if self._task is not None and not self._ended:
            self._ended = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        # Where others have cancelled the task as well, they get to see it.
        if self._ended and task is not None and not task.uncancel() and kind is asyncio.CancelledError:
            raise self._fault from error


class Lease(Scope):
    """Its owner must end it, which reports to the breaker how the worker did: `succeed`, `fail` or `abandon`. A scope
    for waiting on the worker: raises `TimeoutError`, or `WorkerLostError` when the attempt is called back."""

    # False once the client has a part of the answer that no other worker can continue: such an attempt is left to a
    # worker that is called dead as long as it is not silent.
    resumable = True
    heard = True  # something came since the last look
    silent_since_s = 0.0
    called_back = False
    partner: Lease | None = None  # is called back with it
    counted: bool | None = None  # as a success on trial; None before the first event of a stream

    def __init__(self, worker: Worker, on_release: Callable[[], None], prefill_tokens: float = 0.0) -> None:
        self.worker = worker
        self._prefill_tokens = prefill_tokens
        worker.prefill_tokens += prefill_tokens
        self._on_release = on_release
        worker.leases.add(self)
        worker.load += 1

    def prefilled(self) -> None:
        """The first token is there: the prompt is computed."""
        worker = self.worker
        left, self._prefill_tokens = worker.prefill_tokens - self._prefill_tokens, 0.0
        worker.prefill_tokens = left if left > 0.0 else 0.0

    def prove(self) -> None:
        """The first event of a stream counts as a success for a worker on trial; otherwise the whole stream does."""
        self.counted = self.worker.breaker.proved()

    def succeed(self) -> None:
        if not self.counted:
            self.worker.breaker.succeeded()
        self._release()

    def fail(self, reason: str) -> None:
        self.fail_undecided(reason)
        self.blame()

    def fail_undecided(self, reason: str) -> None:
        """The attempt has failed; `blame` or `acquit` says later whether that was the worker's fault."""
        self.worker.last_error = reason
        self.worker.suspect()
        self._release()

    def blame(self) -> None:
        self.worker.breaker.failed(time.monotonic())

    def acquit(self) -> None:
        if not self.counted:
            self.worker.breaker.abandoned()

    def abandon(self) -> None:
        """The attempt says nothing of the worker."""
        self.acquit()
        self._release()

    def _release(self) -> None:
        worker = self.worker
        if self in worker.leases:
            if self._prefill_tokens:
                self.prefilled()
            worker.leases.remove(self)
            worker.load -= 1
            self._on_release()

    def call_back(self) -> None:
        if self.called_back:
            return
        self.called_back, self._fault = True, WorkerLostError
        if self.partner is not None:
            self.partner.call_back()
        if self.resumable:
            self.end_wait()
        else:
            self.heard = True  # its silence counts from here

    def end_after(self, timeout_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.end_wait)

    def __enter__(self) -> None:
        if self.called_back and self.resumable:
            raise WorkerLostError
        self._task, self._ended = self.owner or asyncio.current_task(), False
