"""What the gateway's own work costs with very many workers, in one process and without sockets to them.

The registry, limits, breakers, policies and metrics are the gateway's; workers are entries in its
registry that are always well. Polls are measured against one stand-in worker, and counted for all.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.call import Call
from bough.gateway.dispatch import Dispatch
from bough.gateway.health import LOAD_PAUSE_S, is_well, read_load
from bough.gateway.http_client import Upstream
from bough.gateway.metrics import GatewayMetrics
from bough.gateway.peek import Peek
from bough.gateway.policies import RoutingRequest
from bough.gateway.policy_table import PolicyTable, default_choice
from bough.gateway.registry import Registry
from bough.gateway.worker import Capabilities, Lease
from tests.bench.gateway_processes import worker_processes
from tests.bench.gateway_simulation import Costs, Dialogue

MODEL = "simulated"
POLLS = 500


@dataclass(frozen=True, slots=True)
class Fleet:
    """A gateway's parts with `workers` workers in rotation."""

    registry: Registry
    policies: PolicyTable
    dispatch: Dispatch

    @staticmethod
    def of(policy: str, workers: int) -> Fleet:
        settings = GatewaySettings(policy=policy)
        registry, policies = Registry(settings), PolicyTable(default_choice(settings))
        fleet = Fleet(registry, policies, Dispatch(registry, policies, settings))
        for number in range(workers):
            worker = registry.add(f"http://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:30000")
            worker.capabilities = Capabilities(models=(MODEL,))
            registry.enter_rotation(worker)
        return fleet


def measure_scale(policy: str, workers: int, dialogues: Sequence[Dialogue], users: int) -> dict[str, Any]:
    """Routes each turn as a request of its own, with as many in flight as there are users."""
    before = psutil.Process().memory_info().rss
    fleet = Fleet.of(policy, workers)
    texts = [turn.text for dialogue in dialogues for turn in dialogue]
    running: deque[tuple[Call, Lease]] = deque()
    taken: Counter[str] = Counter()
    began_s = time.process_time()
    for number, text in enumerate(texts):
        routing = RoutingRequest(MODEL, text, None, None, None)
        peek = Peek(MODEL, False, 0, routing, None)
        call = Call("POST", "/v1/completions", "/v1/completions", (), b"", peek, str(number))
        lease = fleet.dispatch.try_lease(call)
        assert lease is not None, "no worker has a limit"
        lease.prefilled()
        taken[lease.worker.id] += 1
        running.append((call, lease))
        if len(running) > users:
            ended, over = running.popleft()
            over.succeed()
            fleet.dispatch.finish(ended)
    routing_s = time.process_time() - began_s
    metrics = GatewayMetrics(fleet.registry, fleet.dispatch)
    for worker in fleet.registry:
        metrics.attempts[worker.url,] += 1
    began_s = time.process_time()
    page = metrics.page()
    return {
        "policy": policy,
        "workers": workers,
        "requests": len(texts),
        "routing_us": 1e6 * routing_s / len(texts),
        "state_mib": (psutil.Process().memory_info().rss - before) / 2**20,
        "requests_imbalance": max(taken.values()) * workers / len(texts),
        "metrics_page_ms": 1e3 * (time.process_time() - began_s),
        "metrics_page_kib": len(page) / 2**10,
    }


def measure_polls(workers: int) -> dict[str, Any]:
    """CPU time of the gateway for a worker's load and health, and the share of a core that all workers take."""

    async def poll(url: str) -> dict[str, Any]:
        settings = GatewaySettings()
        upstream, worker = Upstream(), Registry(settings).add(url)
        await read_load(upstream, worker, 5.0)
        began_s = time.process_time()
        for _ in range(POLLS):
            await read_load(upstream, worker, 5.0)
        load_s = (time.process_time() - began_s) / POLLS
        began_s = time.process_time()
        for _ in range(POLLS):
            await is_well(upstream, worker, 5.0)
        health_s = (time.process_time() - began_s) / POLLS
        share = workers * (load_s / LOAD_PAUSE_S + health_s / settings.health_check_interval_secs)
        return {"workers": workers, "load_us": 1e6 * load_s, "health_us": 1e6 * health_s, "cores_for_polls": share}

    with worker_processes(1, Costs(), 1) as (url,):
        return asyncio.run(poll(url))


def as_text(result: dict[str, Any]) -> str:
    shown = {name: f"{value:,.2f}" if isinstance(value, float) else str(value) for name, value in result.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())
