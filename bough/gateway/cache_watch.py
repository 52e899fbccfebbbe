"""Keeps the `kv_events` policies informed: follows workers' cache events and learns the token ids of prompts.

A prompt's ids are fetched from the /tokenize of the worker that took it, while it computes; no request waits. A worker
that refuses a few times in a row is not asked again: `kv_events` then goes by text, as `cache_aware` does.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from bough.gateway.http_client import Upstream
from bough.gateway.kv_feed import KVFeed
from bough.gateway.peek import MEDIA_MARK, is_heavy
from bough.gateway.policies import Policy, RoutingRequest
from bough.gateway.policies.kv_events import KVEventsPolicy
from bough.gateway.policy_table import PolicyTable
from bough.gateway.registry import Registry, RegistryListener
from bough.gateway.worker import Worker
from bough.memory.tree.event_key import read_key
from bough.server.http import cancel_all

MOST_WAITING = 64
ENOUGH_REFUSALS = 3
AT_ONCE = 4  # per gateway: tokenising costs the worker time that requests could use
LEARN_TIMEOUT_S = 10.0
SENT_JSON = ((b"Content-Type", b"application/json"),)


class TokenizeResponse(msgspec.Struct):
    tokens: list[int]


def tokenize_body(path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The /tokenize request for a prompt; None for a prompt that it cannot tokenize."""
    messages, prompt = body.get("messages"), body.get("text") if path.endswith("/generate") else body.get("prompt")
    if isinstance(messages, list):
        system = body.get("system")  # Anthropic's place for it
        asked: dict[str, Any] = {"messages": [{"role": "system", "content": system}, *messages] if system else messages}
        if body.get("chat_template_kwargs"):
            asked["chat_template_kwargs"] = body["chat_template_kwargs"]
        return asked
    return {"prompt": prompt} if isinstance(prompt, str) else None


class PromptLearner:
    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._refusals: Counter[str] = Counter()  # in a row, by worker

    def sent(self, policy: KVEventsPolicy, worker: Worker, path: str, body: bytes, request: RoutingRequest) -> None:
        """Starts to fetch the ids of a prompt that was sent, if they are unknown. Returns at once."""
        if len(self._tasks) >= MOST_WAITING or self._refusals[worker.id] >= ENOUGH_REFUSALS:
            return
        if is_heavy(body) or MEDIA_MARK in request.text or not policy.curious(request):
            return  # the ids in the places of media are not the tokenizer's
        try:
            asked = tokenize_body(path, msgspec.json.decode(body, type=dict[str, Any]))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if asked is not None:
            task = asyncio.get_running_loop().create_task(self._learn(policy, worker, asked, request.text))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _learn(self, policy: KVEventsPolicy, worker: Worker, asked: dict[str, Any], text: str) -> None:
        body = msgspec.json.encode(asked)
        async with self._turns:
            try:
                answer = await self._upstream.ask(worker, "POST", "/tokenize", LEARN_TIMEOUT_S, SENT_JSON, body)
                tokens = msgspec.json.decode(answer[1], type=TokenizeResponse).tokens if answer[0] == 200 else None
            except (OSError, msgspec.MsgspecError):
                tokens = None
        if tokens is None:
            self._refusals[worker.id] += 1
        else:
            self._refusals.pop(worker.id, None)
            policy.learn(text, tokens)

    async def close(self) -> None:
        await cancel_all(self._tasks)


# ---- which caches to follow


class CacheWatch(RegistryListener):
    """Listens to the registry and the policy table. Created on the gateway's event loop, before requests come."""

    def __init__(
        self, registry: Registry, policies: PolicyTable, upstream: Upstream, key_file: str | None = None
    ) -> None:
        self._registry = registry
        self._feed = KVFeed(None if key_file is None else read_key(key_file))
        self._learner = PromptLearner(upstream)
        self.watching: dict[str | None, KVEventsPolicy] = {}
        registry.listen(self)
        policies.on_built, policies.on_dropped = self.built, self.dropped

    async def close(self) -> None:
        await self._learner.close()
        await self._feed.close()

    def sent(self, worker: Worker, path: str, body: bytes, request: RoutingRequest) -> None:
        policy = self.watching.get(request.model or None)
        if policy is not None:
            self._learner.sent(policy, worker, path, body, request)

    def built(self, model: str | None, policy: Policy) -> None:
        """A model has a policy, which replaces the previous one."""
        self.dropped(model)
        if isinstance(policy, KVEventsPolicy):
            self.watching[model] = policy
            for worker in self._registry:
                self.changed(worker)

    def dropped(self, model: str | None) -> None:
        before = self.watching.pop(model, None)
        if before is not None:
            for worker in self._registry:
                self._feed.unfollow(worker.id, before)

    # ---- registry changes

    def changed(self, worker: Worker) -> None:
        for model, policy in self.watching.items():
            if not worker.in_rotation or not worker.serves(model):
                self._feed.unfollow(worker.id, policy)
            elif not self._feed.follows(worker.id, policy):
                self._feed.follow(worker.id, worker.url, worker.capabilities.kv_events_config, policy)

    def removed(self, worker: Worker) -> None:
        for policy in self.watching.values():
            self._feed.unfollow(worker.id, policy)
