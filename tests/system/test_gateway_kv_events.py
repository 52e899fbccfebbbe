"""`kv_events` before a real engine that wants a key: what the gateway learns of its cache is what the engine then finds
in it. And what that engine listens on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq.auth

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.cache_watch import SENT_JSON, CacheWatch
from bough.gateway.http_client import Upstream
from bough.gateway.launching import free_ports
from bough.gateway.peek import peek
from bough.gateway.policies import RoutingRequest
from bough.gateway.policies.kv_events import KVEventsPolicy
from bough.gateway.policy_table import PolicyChoice, PolicyTable
from bough.gateway.registry import Registry
from bough.gateway.worker import Capabilities, Worker
from bough.memory.tree.event_key import read_key
from tests.fakes.gateways import PATIENCE_S, until
from tests.system.serving import Server, running
from tests.system.sockets import LOOPBACK, inet_listeners, port_of, private_names, reached_from_outside, tree_of

FLAGS = ("--load-format", "dummy", "--max-total-tokens", "4096", "--cpu-threads", "1", "--served-model-name", "m")
pytestmark = pytest.mark.slow
RULES = "Answer in one sentence. Name your source. Never guess, and say so when you do not know. " * 12
REQUESTS = {
    "/v1/completions": {"prompt": RULES + "What is a tree?"},
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": "What is a tree?"}]
    },
    "/generate": {"text": "By text. " + RULES},
}


@dataclass(frozen=True)
class KeyedEngine:
    """A real server that publishes cache events over TCP to who holds a key."""

    server: Server
    event_ports: tuple[int, ...]
    config: str
    key_file: str


class Scene:
    """A registry with the engine in rotation, under kv_events; nothing sent counts as cached until it is announced."""

    def __init__(self, keyed: KeyedEngine) -> None:
        self.policies = PolicyTable(PolicyChoice("kv_events", {"trust_sent_secs": 0.0}))
        self.registry, self.upstream = Registry(GatewaySettings()), Upstream()
        self.watch = CacheWatch(self.registry, self.policies, self.upstream, keyed.key_file)
        self.worker: Worker = self.registry.add(keyed.server.url)
        self.worker.capabilities = Capabilities(models=("m",), kv_events_config=keyed.config)

    def policy(self) -> KVEventsPolicy:
        found = self.policies.of("m")
        assert isinstance(found, KVEventsPolicy)
        return found

    async def ask(self, path: str, content: dict[str, Any]) -> tuple[RoutingRequest, float]:
        """Sends a request, and tells which share of its prompt the engine had cached."""
        limit = {"sampling_params": {"max_new_tokens": 1}} if path == "/generate" else {"model": "m", "max_tokens": 1}
        body = json.dumps({**content, **limit}).encode()
        routing = RoutingRequest("m", peek(body, {}).routing.text, None, None, None)
        self.watch.sent(self.worker, path, body, routing)
        status, raw = await self.upstream.ask(self.worker, "POST", path, PATIENCE_S, SENT_JSON, body)
        assert status == 200, raw
        answer = json.loads(raw)
        if path == "/generate":
            return routing, answer["meta_info"]["cached_tokens"] / answer["meta_info"]["prompt_tokens"]
        usage = answer["usage"]
        return routing, usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


@pytest.mark.parametrize("path", REQUESTS)
def test_what_is_expected_is_what_is_cached(path: str, keyed: KeyedEngine) -> None:
    async def play() -> None:
        scene = Scene(keyed)
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


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="sockets are read from Linux's /proc")
def test_an_engine_listens_on_loopback_and_in_a_private_folder_alone(keyed: KeyedEngine) -> None:
    processes = tree_of(keyed.server.process.pid)
    ports = {port_of(keyed.server.url), *keyed.event_ports}
    assert inet_listeners(processes) == {(LOOPBACK, port) for port in ports}
    assert not reached_from_outside(ports)
    assert private_names(processes) == {"scheduler", "detokenizer", "client0"}


def test_the_key_is_seen_in_no_process_list_and_no_answer(keyed: KeyedEngine) -> None:
    secret = read_key(keyed.key_file).secret.decode()
    shown = httpx.get(f"{keyed.server.url}/server_info").text
    assert json.loads(shown)["kv_events_config"] == keyed.config and secret not in shown
    assert all(secret not in word for process in tree_of(keyed.server.process.pid) for word in process.cmdline())


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedEngine]:
    key_file = zmq.auth.create_certificates(tmp_path_factory.mktemp("keys"), "events")[1]
    events, replays = free_ports(2)
    endpoints = {"endpoint": f"tcp://{LOOPBACK}:{events}", "replay_endpoint": f"tcp://{LOOPBACK}:{replays}"}
    config = json.dumps({**endpoints, "key_file": key_file})
    with running(*FLAGS, "--kv-events-config", config) as server:
        yield KeyedEngine(server, (events, replays), config, key_file)
