"""Active health checks: when a worker enters rotation and when it leaves.

A worker outside of rotation is checked every half second; one in rotation at the interval of the settings, and at once
when a request has failed or is silent for too long.
"""

import asyncio
import contextlib
import contextvars
import errno
import json
import logging
from typing import Any

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.http_client import Upstream, describe, out_of_descriptors
from bough.gateway.registry import Registry, RegistryListener
from bough.gateway.worker import Capabilities, Worker
from bough.server.http import cancel_all, race

log = logging.getLogger(__name__)

PROBE_PAUSE_S = 0.5
FIRST_LOAD_S = 0.5  # a load that takes longer is not waited for before the first request
LOAD_PAUSE_S = 1.0  # loads are polled more often than health: they tell what other gateways have sent
UNKNOWN_ROUTE = frozenset({404, 405, 501})
LOADS = "/v1/loads"
LOAD_FIGURES = ("num_running_reqs", "num_waiting_reqs")
SPEED_FIGURE = "prefill_tokens_per_s"
ENGINE_DEAD = b"EngineDeadError"  # of Bough's servers, in the moments before they end as well


class HealthRecord:
    def __init__(self, failures: int, successes: int) -> None:
        self._needed = {False: failures, True: successes}
        self._last = False
        self._row = 0

    @property
    def failing(self) -> bool:
        return not self._last

    def note(self, passed: bool) -> bool:
        """Whether enough equal results in a row have come."""
        self._row = self._row + 1 if passed == self._last else 1
        self._last = passed
        return self._row >= self._needed[passed]


class HealthChecks(RegistryListener):
    def __init__(self, registry: Registry, upstream: Upstream, settings: GatewaySettings) -> None:
        self._registry = registry
        self._upstream = upstream
        self._settings = settings
        self._tasks: dict[str, asyncio.Task[None]] = {}
        registry.listen(self)

    def added(self, worker: Worker) -> None:
        wake = asyncio.Event()
        worker.suspect = wake.set
        # In a context of its own: it outlives the request that added the worker, whose id its log lines would carry.
        context = contextvars.Context()
        self._tasks[worker.id] = asyncio.create_task(self._watch(worker, wake), context=context)

    def changed(self, worker: Worker) -> None:
        """Checks a worker that has left at once: it may be back soon."""
        if not worker.in_rotation:
            worker.suspect()

    def removed(self, worker: Worker) -> None:
        self._tasks.pop(worker.id).cancel()

    async def close(self) -> None:
        await cancel_all(self._tasks.values())

    async def _watch(self, worker: Worker, wake: asyncio.Event) -> None:
        settings = self._settings
        record = HealthRecord(settings.health_failure_threshold, settings.health_success_threshold)
        while True:
            wake.clear()
            try:
                await self._check(worker, record)
            except Exception:  # not swallowed: logged with its traceback, and the worker is asked again
                log.exception("the check of worker %s at %s failed", worker.id, worker.url)
            # A worker that failed its last check is not waited on for a whole interval, in rotation or not.
            steady = worker.in_rotation and not record.failing
            await self._rest(worker, wake, settings.health_check_interval_secs if steady else PROBE_PAUSE_S)

    async def _check(self, worker: Worker, record: HealthRecord) -> None:
        try:
            timeout_s, path = self._settings.health_check_timeout_secs, self._settings.health_check_endpoint
            await is_well(self._upstream, worker, timeout_s, f"/{path.lstrip('/')}")
        except (OSError, ValueError) as error:
            worker.last_error = reason = f"its health check failed: {describe(error)}"
            ended = nobody_listens(error)
            if not out_of_descriptors(error) and (record.note(passed=False) or ended):
                self._registry.leave_rotation(worker, reason, ended=ended)
            return
        if not record.note(passed=True):
            return
        found = await discover(self._upstream, worker, self._settings.health_check_timeout_secs)
        if not worker.in_rotation:
            worker.capabilities = found
            with contextlib.suppress(OSError):  # it is well, and not held up for this
                await read_load(self._upstream, worker, FIRST_LOAD_S)
            self._registry.enter_rotation(worker)
        elif found.models and found != worker.capabilities:  # an adapter was loaded, or another engine is there
            worker.capabilities = found
            self._registry.notify_changed(worker)

    async def _rest(self, worker: Worker, wake: asyncio.Event, pause_s: float) -> None:
        """Until the next check is due or requested. Polls the load meanwhile; a worker that does not answer that is
        checked at once."""
        polling, asked = asyncio.ensure_future(self._poll_load(worker)), asyncio.ensure_future(wake.wait())
        await race(polling, asked, timeout_s=pause_s)

    async def _poll_load(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(LOAD_PAUSE_S)
                if worker.in_rotation:
                    await read_load(self._upstream, worker, self._settings.health_check_timeout_secs)


async def has_ended(upstream: Upstream, worker: Worker) -> bool:
    """Whether nobody listens where a worker was a moment ago, or its server says that the engine is dead."""
    try:
        return ENGINE_DEAD in (await upstream.get(worker, "/health", FIRST_LOAD_S))[1]
    except OSError as error:
        return nobody_listens(error)


def nobody_listens(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ECONNREFUSED


# ---- what a worker says of itself: any OpenAI-compatible server will do, and what it does not answer stays unknown


async def is_well(upstream: Upstream, worker: Worker, timeout_s: float, path: str = "/health") -> None:
    """Raises what is wrong with the worker. One without that path must list its models."""
    status, _ = await upstream.get(worker, path, timeout_s)
    if status in UNKNOWN_ROUTE:
        status, _ = await upstream.get(worker, "/v1/models", timeout_s)
    if status != 200:
        raise ConnectionError(f"its health check answered {status}")


async def discover(upstream: Upstream, worker: Worker, timeout_s: float) -> Capabilities:
    listed: dict[str, Any] = {}
    info: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        listed = await _json(upstream, worker, "/v1/models", timeout_s)
    with contextlib.suppress(OSError):
        info = await _json(upstream, worker, "/server_info", timeout_s)
    entries = listed.get("data")
    listed_ids = [entry.get("id") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    names = [name for name in listed_ids if isinstance(name, str)]
    if not names and isinstance(info.get("model_path"), str):
        names = [str(info.get("served_model_name") or info["model_path"])]
    capacity = info.get("max_running_requests")
    return Capabilities(
        models=tuple(names),
        capacity=capacity if isinstance(capacity, int) and not isinstance(capacity, bool) else None,
        version=_text(info.get("version")),
        kv_events_config=_text(info.get("kv_events_config")),
    )


async def loads_of(upstream: Upstream, worker: Worker, target: str, timeout_s: float) -> list[dict[str, Any]]:
    """Of each of its replicas; of none if the worker does not report them."""
    loads = (await _json(upstream, worker, target, timeout_s)).get("loads")
    return [load for load in loads if isinstance(load, dict)] if isinstance(loads, list) else []


async def read_load(upstream: Upstream, worker: Worker, timeout_s: float) -> None:
    """Running and waiting requests from any sender, and how fast prompts are computed; 0 and unknown if the worker does
    not report them."""
    own_before = worker.load
    replicas = await loads_of(upstream, worker, LOADS, timeout_s)

    def total(*names: str) -> float:
        figures = [load.get(name) for load in replicas for name in names]
        return float(sum(figure for figure in figures if isinstance(figure, int | float)))

    worker.note_report(total(*LOAD_FIGURES), total(SPEED_FIGURE) or None, own_before)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


async def _json(upstream: Upstream, worker: Worker, path: str, timeout_s: float) -> dict[str, Any]:
    """An empty object for anything else. Raises an `OSError` without an answer."""
    status, body = await upstream.get(worker, path, timeout_s)
    try:
        content = json.loads(body) if status == 200 else {}
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
