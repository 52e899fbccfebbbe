"""The gateway without its socket: owns the parts, wires them, and serves one proxied request."""

import asyncio
import logging
import time

import msgspec

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.bodies import Bodies
from bough.gateway.cache_watch import CacheWatch
from bough.gateway.call import AccessLog, Call
from bough.gateway.clients import Clients
from bough.gateway.dispatch import Dispatch
from bough.gateway.health import HealthChecks
from bough.gateway.http_client import Upstream
from bough.gateway.metrics import GatewayMetrics
from bough.gateway.outlet import Outlet
from bough.gateway.pairing import Pairing
from bough.gateway.policy_table import PolicyTable, default_choice
from bough.gateway.proxy import Proxy, StickyResponses
from bough.gateway.registry import LAUNCHED, Registry
from bough.gateway.tracing import traces_to
from bough.gateway.worker import Scope
from bough.server.errors import HttpError

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # what the log shows of a request whose client has left
TICK_S, QUEUE_TICKS = 1.0, 10


class Gateway:
    """Created on the event loop that it serves on."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.bodies = Bodies(settings)
        self.registry = Registry(settings)
        self.policies = PolicyTable(default_choice(settings), self.registry.knows)
        self.upstream = Upstream()
        self.cache_watch = CacheWatch(self.registry, self.policies, self.upstream, settings.kv_events_key_file)
        self.registry.listen(self.policies)
        self.dispatch = Dispatch(self.registry, self.policies, settings)
        self.metrics = GatewayMetrics(self.registry, self.dispatch)
        self.pairing = Pairing(self.registry, settings) if settings.pd_disaggregation else None
        self.health = HealthChecks(self.registry, self.upstream, settings)
        self.sticky = StickyResponses()
        self.log = AccessLog(settings.access_log)
        self.clients = Clients(settings)
        parts = (self.dispatch, self.cache_watch, self.upstream, settings, self.metrics, self.sticky)
        self._proxy = Proxy(*parts, self.pairing)
        self._traces = traces_to(settings.otlp_endpoint)
        self._running: dict[Scope, float] = {}  # the scope of each call, and when its time is up
        self._called = asyncio.Event()  # since the last look
        self._stopping = False
        self._ticking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        for url in self.settings.worker_urls:
            self.registry.add(url, source="flag")
        for url, port in self.settings.prefill:
            self.registry.add(url, source="flag", bootstrap_port=port)
        for url, key in self.settings.launched:
            self.registry.add(url, key, source=LAUNCHED)
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        await self.health.close()
        await self.cache_watch.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        self.upstream.close()

    def cut_off(self) -> None:
        self._stopping = True
        for scope in self._running:
            scope.end_wait()

    async def serve(self, call: Call, outlet: Outlet) -> None:
        """Answers the call until its client leaves or its time is up. Raises an `HttpError` only before anything was
        sent."""
        if call.peek.model is None:
            self._name_model(call)
        if self._traces is not None:
            call.span = self._traces.begin(call)
        scope, exchange = Scope(), outlet.exchange
        scope.owner = call.task = exchange.task
        self._running[scope] = time.monotonic() + self.settings.request_timeout_secs
        self._called.set()
        try:
            with scope:
                exchange.on_leave = scope.end_wait
                if exchange.gone:
                    raise TimeoutError
                await self._proxy.answer(call, outlet)
        except TimeoutError:
            if not exchange.gone:
                await self._out_of_time(call, outlet)
            elif not outlet.ended:  # else the client has left with its whole response
                call.status = CLIENT_GONE
        finally:
            del self._running[scope]
            self.dispatch.finish(call)

    def ended(self, call: Call) -> None:
        took_s = time.perf_counter() - call.began_s
        self.metrics.ended(call, took_s, known_model=self.registry.knows(call.peek.model))
        if self._traces is not None and call.span is not None:
            self._traces.end(call.span, call)
        self.log.write(call, took_s)

    async def _out_of_time(self, call: Call, outlet: Outlet) -> None:
        failure = HttpError(504, "The request took too long (--request-timeout-secs).", "GatewayTimeoutError")
        if self._stopping:
            failure = HttpError(503, "The gateway is shutting down.", "ServiceUnavailableError", {"Retry-After": "1"})
        if not call.status:  # nothing was sent
            raise failure
        await outlet.broken(str(failure))

    def _name_model(self, call: Call) -> None:
        """Gives a request without a model the only model, if there is only one."""
        models = self.registry.models()
        if len(models) == 1:
            routing = msgspec.structs.replace(call.peek.routing, model=models[0])
            call.peek = msgspec.structs.replace(call.peek, model=models[0], routing=routing)

    async def _tick(self) -> None:
        while True:
            if not self._running:  # nothing waits, lasts or is remembered
                self._called.clear()
                await self._called.wait()
            try:
                for _ in range(QUEUE_TICKS):
                    await asyncio.sleep(TICK_S / QUEUE_TICKS)
                    self._look_at_times(time.monotonic())
                    self.dispatch.serve_waiting()
                self.policies.tick(time.monotonic())
                if self.pairing is not None:
                    self.pairing.policies.tick(time.monotonic())
            except Exception:  # not swallowed: logged with its traceback, and the next tick comes
                log.exception("the gateway's housekeeping failed")

    def _look_at_times(self, now_s: float) -> None:
        """One look at all requests costs less than a timer for each."""
        for scope, end_s in self._running.items():
            if end_s > now_s:
                break  # later ones have more time
            scope.end_wait()
        for worker in self.registry:
            worker.look_for_silence(now_s, self.settings.health_check_timeout_secs)
