"""Keeps the `kv_events` policies informed: which caches to follow, and which prompts to learn.

Listens to the registry (workers come into rotation and leave it) and to the policy table (a model's policy is made or
changed). Owns the feed of cache events and the learner of prompts; with no model under `kv_events` both stand idle.
"""

from __future__ import annotations

from bough.gateway.http_client import Upstream
from bough.gateway.kv_feed import KVFeed
from bough.gateway.policies import Policy, RoutingRequest
from bough.gateway.policies.kv_events import KVEventsPolicy
from bough.gateway.policy_table import PolicyTable
from bough.gateway.prompt_learner import PromptLearner
from bough.gateway.registry import Registry, RegistryListener
from bough.gateway.worker import Worker, worker_id
from bough.memory.tree.event_key import read_key

LEARN_TIMEOUT_S = 10.0
SENT_JSON = ((b"Content-Type", b"application/json"),)


class CacheWatch(RegistryListener):
    """A listener of the registry. Made before requests come, on the gateway's event loop."""

    def __init__(
        self, registry: Registry, policies: PolicyTable, upstream: Upstream, key_file: str | None = None
    ) -> None:
        self._registry = registry
        self._upstream = upstream
        self._feed = KVFeed(None if key_file is None else read_key(key_file))
        self._learner = PromptLearner(self._post)
        self._watching: dict[str | None, KVEventsPolicy] = {}
        registry.listen(self)
        policies.on_built, policies.on_dropped = self.built, self.dropped

    async def close(self) -> None:
        await self._learner.close()
        await self._feed.close()

    def sent(self, worker: Worker, path: str, body: bytes, request: RoutingRequest) -> None:
        """A request was sent to a worker. Returns at once."""
        policy = self._watching.get(request.model or None)
        if policy is not None:
            self._learner.sent(policy, worker.url, path, body, request)

    def built(self, model: str | None, policy: Policy) -> None:
        """A model has got a policy, which replaces the one before."""
        self.dropped(model)
        if isinstance(policy, KVEventsPolicy):
            self._watching[model] = policy
            for worker in self._registry:
                self.changed(worker)

    def dropped(self, model: str | None) -> None:
        """The model's policy is gone."""
        before = self._watching.pop(model, None)
        if before is not None:
            for worker in self._registry:
                self._feed.unfollow(worker.id, before)

    # ---- registry changes

    def changed(self, worker: Worker) -> None:
        for model, policy in self._watching.items():
            if not worker.in_rotation or not worker.serves(model):
                self._feed.unfollow(worker.id, policy)
            elif not self._feed.follows(worker.id, policy):
                self._feed.follow(worker.id, worker.url, worker.capabilities.kv_events_config, policy)

    def removed(self, worker: Worker) -> None:
        for policy in self._watching.values():
            self._feed.unfollow(worker.id, policy)

    async def _post(self, worker_url: str, body: bytes) -> tuple[int, bytes]:
        worker = self._registry.get(worker_id(worker_url))
        if worker is None:
            return 0, b""
        try:
            return await self._upstream.ask(worker, "POST", "/tokenize", LEARN_TIMEOUT_S, SENT_JSON, body)
        except OSError:
            return 0, b""
