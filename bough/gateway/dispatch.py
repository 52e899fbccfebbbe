"""Chooses a worker for each request, limits concurrent requests, and queues those that must wait.

A request that can be sent gets a `Lease` at once; any other waits in a bounded queue until there is room.
"""

import asyncio
import bisect
import itertools
import operator
import time
from dataclasses import dataclass, field

from bough.core.gateway_settings import UNLIMITED, GatewaySettings
from bough.gateway.breaker import BreakerState
from bough.gateway.call import Call
from bough.gateway.policy_table import PolicyTable
from bough.gateway.registry import Registry, RegistryListener
from bough.gateway.worker import Lease, Worker, WorkerState
from bough.server.errors import HttpError

PATIENCE_LOOK_S = 0.5
NO_WORKER_PATIENCE_S = 10.0  # for a worker to come back; longer only for those that the gateway itself restarts
_is_closed = operator.attrgetter("breaker.closed")


@dataclass(eq=False, slots=True)
class Waiter:
    """A queued request: by priority, then requests that continue, then by arrival."""

    call: Call
    place: tuple[int, int, int]
    lease: asyncio.Future[Lease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Dispatch(RegistryListener):
    """Listens to the registry: a worker that enters rotation can take waiting requests."""

    def __init__(self, registry: Registry, policies: PolicyTable, settings: GatewaySettings) -> None:
        self._registry = registry
        self._policies = policies
        self._settings = settings
        self._limit = settings.max_concurrent_requests
        self._workers_limited = settings.max_concurrent_per_worker != UNLIMITED
        self.active = 0  # admitted and not finished
        self._waiting: list[Waiter] = []
        self._numbers = itertools.count()
        registry.listen(self)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def try_next(self, call: Call) -> Lease | None:
        """A worker for the call's next attempt, unless it must `wait`: as behind a request for the same model."""
        if self._waiting and not call.admitted:
            model = call.peek.model
            if any(waiter.call.peek.model == model and not waiter.lease.done() for waiter in self._waiting):
                return None
        return self.try_lease(call)

    def finish(self, call: Call) -> None:
        if call.admitted:
            call.admitted = False
            self.active -= 1
            if self._waiting:
                self.serve_waiting()

    def serve_waiting(self) -> None:
        """Gives leases to waiting requests while there is room. Also called regularly: a breaker half-opens without
        notice."""
        if not self._waiting:
            return
        full: set[str | None] = set()  # models: where one request finds no room, the next one does not either
        for waiter in list(self._waiting):
            call = waiter.call
            if waiter.lease.done() or (call.peek.model in full and not call.admitted and call.pinned is None):
                continue
            try:
                lease = self.try_lease(call)
            except Exception as error:  # noqa: BLE001  (its own request gets it, not the caller)
                waiter.lease.set_exception(error)
                continue
            if lease is not None:
                waiter.lease.set_result(lease)
            elif not call.admitted and call.pinned is None:
                full.add(call.peek.model)

    # ---- registry changes

    def changed(self, worker: Worker) -> None:
        self.serve_waiting()

    removed = changed

    # ---- choosing

    def try_lease(self, call: Call) -> Lease | None:
        if not call.admitted and self._limit != UNLIMITED and self.active >= self._limit:
            return None
        now_s, routing = time.monotonic(), call.peek.routing
        candidates = self._candidates(call)
        if self._workers_limited or not all(map(_is_closed, candidates)):
            candidates = [worker for worker in candidates if worker.admits(now_s)]
        if not candidates:
            return None
        # One that has failed this request gets it again only when no other is left.
        fresh = [w for w in candidates if w.id not in call.tried] or candidates if call.tried else candidates
        policy = self._policies.of(call.peek.model)
        choice = policy.choose(fresh, routing)
        worker = self._registry.get(choice.worker_id)
        assert worker is not None
        if not call.admitted:
            call.admitted = True
            self.active += 1
        worker.breaker.begin(now_s)
        policy.routed(worker.id, routing)
        call.worker, call.expected_cached = worker, choice.expected_cached
        if call.pinned is not None:
            call.reason = "it holds what the request continues"
        elif routing.target is not None and routing.target in (worker.id, worker.url):
            call.reason = "the request names it"
        elif routing.session is not None:
            call.reason = "its session stays there"
        else:
            call.reason = type(policy).__name__ if len(fresh) > 1 else "no other could take it"
        return Lease(worker, self.serve_waiting, choice.prefill_tokens)

    def has_untried(self, call: Call) -> bool:
        return any(worker.id not in call.tried for worker in self._candidates(call))

    def _candidates(self, call: Call) -> list[Worker]:
        if call.pinned is not None:
            # One that drains is taken too: what it holds, nobody else has.
            return [call.pinned] if call.pinned.in_rotation and not call.pinned.removed else []
        available = self._registry.available(call.peek.model)
        return [worker for worker in available if worker.id not in call.unable] if call.unable else available

    def _check_model(self, call: Call) -> None:
        """Refuses an unknown model, unless a worker that has not reported its models may have it."""
        model = call.peek.model
        if model is None or self._registry.serving(model):
            return
        known = self._registry.models()
        if known and not any(worker.state is WorkerState.STARTING for worker in self._registry):
            message = f"There is no model {model!r}. The models here are {', '.join(known)}."
            raise HttpError(404, message, "NotFoundError")

    # ---- waiting

    async def wait(self, call: Call) -> Lease:
        """Raises a 404, 408, 429 or 503 where the call gets no worker."""
        self._check_model(call)
        if not call.admitted and len(self._waiting) >= self._settings.queue_size:
            if not self._usable(call):
                raise self._gave_up(call)
            message = f"{len(self._waiting)} requests wait already (--queue-size); try again soon."
            raise HttpError(429, message, "TooManyRequestsError", {"Retry-After": "1"})
        waiter = Waiter(call, (-call.peek.priority, 0 if call.admitted else 1, next(self._numbers)))
        bisect.insort(self._waiting, waiter, key=lambda each: each.place)
        began_s = time.monotonic()
        try:
            self.serve_waiting()
            # The timeout is checked repeatedly: it is longer while a worker may come back.
            while not waiter.lease.done():
                self._check_model(call)
                left_s = began_s + self._patience_s(call) - time.monotonic()
                if left_s <= 0:
                    raise self._gave_up(call)
                await asyncio.wait({waiter.lease}, timeout=min(left_s, PATIENCE_LOOK_S))
            return waiter.lease.result()
        except asyncio.CancelledError:  # the client disconnected, maybe at the moment its lease was granted
            if waiter.lease.done() and waiter.lease.exception() is None:
                waiter.lease.result().abandon()
            else:
                waiter.lease.cancel()
            raise
        finally:
            self._waiting.remove(waiter)
            call.queued_s += time.monotonic() - began_s

    def _patience_s(self, call: Call) -> float:
        timeout_s = self._settings.queue_timeout_secs
        if self._usable(call):
            return timeout_s
        hopeful = [worker for worker in self._registry if worker.id not in call.unable]
        if any(worker.expected_back for worker in hopeful):
            return timeout_s
        return min(timeout_s, NO_WORKER_PATIENCE_S if hopeful else 0.0)

    def _gave_up(self, call: Call) -> HttpError:
        if self._usable(call):
            message = "The request waited too long for its turn (--queue-timeout-secs); try again later."
            return HttpError(408, message, "RequestTimeoutError", {"Retry-After": "1"})
        which = f" of {call.peek.model}" if call.peek.model else ""
        message = f"No worker{which} is in rotation with a closed breaker; GET /workers shows why. Try again later."
        return HttpError(503, message, "ServiceUnavailableError", {"Retry-After": "1"})

    def _usable(self, call: Call) -> list[Worker]:
        """Workers that would take the call if they had room."""
        now_s = time.monotonic()
        return [w for w in self._candidates(call) if w.breaker.state(now_s) is not BreakerState.OPEN]
