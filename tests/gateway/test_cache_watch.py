"""`kv_events` behind a real registry, with stand-in engines that publish what they cache."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.cache_watch import CacheWatch
from bough.gateway.http_client import Upstream
from bough.gateway.policies import RoutingRequest
from bough.gateway.policies.kv_events import KVEventsPolicy
from bough.gateway.policy_table import PolicyChoice, PolicyTable
from bough.gateway.registry import Registry
from bough.gateway.worker import Capabilities, Worker
from tests.bench.gateway_simulation import Costs
from tests.bench.gateway_worker import MODEL, Exchange, StandIn, WorkerSpec
from tests.fakes.gateways import until

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 16
REQUEST = RoutingRequest(MODEL, PROMPT, None, None, None)
INSTANT = Costs(prefill_us=0.0, decode_ms=0.0, crowd_ms=0.0, cache_tokens=4096)


@dataclass
class Scene:
    """A registry with one engine in rotation, under kv_events."""

    registry: Registry
    policies: PolicyTable
    watch: CacheWatch
    upstream: Upstream
    worker: Worker

    def policy(self) -> KVEventsPolicy:
        found = self.policies.of(MODEL)
        assert isinstance(found, KVEventsPolicy)
        return found

    async def send(self, prompt: str = PROMPT) -> None:
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4}).encode()
        self.watch.sent(self.worker, "/v1/completions", body, RoutingRequest(MODEL, prompt, None, None, None))
        status, answer = await self.upstream.ask(self.worker, "POST", "/v1/completions", 30.0, body=body)
        assert status == 200 and answer

    def known_share(self) -> float:
        return self.policy().cached(REQUEST).get(self.worker.id, 0.0)


@contextlib.asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    events = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replays"}
    engine = StandIn(WorkerSpec("one", INSTANT, json.dumps(events)))
    server = await asyncio.get_running_loop().create_server(lambda: Exchange(engine), "127.0.0.1", 0)
    registry, policies, upstream = Registry(GatewaySettings()), PolicyTable(PolicyChoice("kv_events")), Upstream()
    watch = CacheWatch(registry, policies, upstream)
    try:
        worker = registry.add(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        worker.capabilities = Capabilities(models=(MODEL,), kv_events_config=json.dumps(events))
        registry.enter_rotation(worker)
        yield Scene(registry, policies, watch, upstream, worker)
    finally:
        await watch.close()
        upstream.close()
        server.close()
        engine.close()


def test_the_policy_learns_what_the_worker_has_cached(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as stage:
            policy = stage.policy()
            assert policy.curious(REQUEST)
            await stage.send()
            await until(lambda: not policy.curious(REQUEST) and stage.known_share() > 0.9)

    asyncio.run(play())


def test_a_worker_that_leaves_the_rotation_is_followed_again_when_it_returns(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as stage:
            stage.policy()
            await stage.send()
            await until(lambda: stage.known_share() > 0.9)
            stage.registry.leave_rotation(stage.worker, "test")
            assert stage.known_share() == 0.0
            stage.registry.enter_rotation(stage.worker)
            await until(lambda: stage.known_share() > 0.9)
            stage.registry.remove(stage.worker)
            assert stage.known_share() == 0.0

    asyncio.run(play())


def test_a_changed_policy_starts_to_listen_at_once(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as stage:
            first = stage.policy()
            await stage.send()
            await until(lambda: stage.known_share() > 0.9)
            stage.policies.choose(MODEL, PolicyChoice("round_robin"))
            assert first.cached(REQUEST) == {}
            stage.policies.choose(MODEL, PolicyChoice("kv_events", {"cache_threshold": 0.2}))
            await stage.send()
            await until(lambda: stage.known_share() > 0.9)
            assert stage.policy() is not first

    asyncio.run(play())
