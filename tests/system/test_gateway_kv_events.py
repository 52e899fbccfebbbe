"""`kv_events` before a real engine: what the gateway learns of its cache is what the engine then finds in it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bough.gateway.breaker import BreakerSettings
from bough.gateway.cache_watch import SENT_JSON, CacheWatch
from bough.gateway.peek import peek
from bough.gateway.policies import RoutingRequest
from bough.gateway.policies.kv_events import KVEventsPolicy
from bough.gateway.policies.pinning import PinningPolicy
from bough.gateway.policy_table import PolicyChoice, PolicyTable
from bough.gateway.registry import Registry
from bough.gateway.upstream import Upstream
from bough.gateway.worker import Capabilities, Worker
from tests.fakes.gateways import PATIENCE_S, until
from tests.system.serving import running

FLAGS = ("--load-format", "dummy", "--max-total-tokens", "4096", "--cpu-threads", "1", "--served-model-name", "m")
RULES = "Answer in one sentence. Name your source. Never guess, and say so when you do not know. " * 12
REQUESTS = {
    "/v1/completions": {"prompt": RULES + "What is a tree?"},
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": "What is a tree?"}]
    },
    "/generate": {"text": "By text. " + RULES},
}


class Scene:
    """A registry with the engine in rotation, under kv_events; nothing sent counts as cached until it is announced."""

    def __init__(self, url: str, config: str) -> None:
        self.policies = PolicyTable(PolicyChoice("kv_events", {"trust_sent_secs": 0.0}))
        self.registry, self.upstream = Registry(BreakerSettings()), Upstream()
        self.watch = CacheWatch(self.registry, self.policies, self.upstream)
        self.worker: Worker = self.registry.add(url)
        self.worker.capabilities = Capabilities(models=("m",), kv_events_config=config)

    def policy(self) -> KVEventsPolicy:
        found = self.policies.of("m")
        assert isinstance(found, PinningPolicy) and isinstance(found.policy, KVEventsPolicy)
        return found.policy

    async def ask(self, path: str, content: dict[str, Any]) -> tuple[RoutingRequest, float]:
        """Sends a request, and tells which share of its prompt the engine had cached."""
        limit = {"sampling_params": {"max_new_tokens": 1}} if path == "/generate" else {"model": "m", "max_tokens": 1}
        body = json.dumps({**content, **limit}).encode()
        routing = RoutingRequest("m", peek(body, []).routing.text, None, None, None)
        self.watch.sent(self.worker, path, body, routing)
        status, raw = await self.upstream.ask(self.worker, "POST", path, PATIENCE_S, SENT_JSON, body)
        assert status == 200, raw
        answer = json.loads(raw)
        if path == "/generate":
            return routing, answer["meta_info"]["cached_tokens"] / answer["meta_info"]["prompt_tokens"]
        usage = answer["usage"]
        return routing, usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


@pytest.mark.parametrize("path", REQUESTS)
def test_what_is_expected_is_what_is_cached(path: str, engine_url: tuple[str, str]) -> None:
    async def play() -> None:
        scene = Scene(*engine_url)
        try:
            policy = scene.policy()
            scene.registry.enter_rotation(scene.worker)
            routing, before = await scene.ask(path, REQUESTS[path])
            await until(lambda: policy.cached(routing).get(scene.worker.id, 0.0) > 0.9)
            expected = policy.cached(routing)[scene.worker.id]
            _, cached = await scene.ask(path, REQUESTS[path])
            assert before < 0.9 < cached
            assert expected == pytest.approx(cached, abs=0.02)
        finally:
            await scene.watch.close()
            scene.upstream.close()

    asyncio.run(play())


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("events")
    config = json.dumps({"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replays"})
    with running(*FLAGS, "--kv-events-config", config) as server:
        yield server.url, config
