"""Asks workers for the token ids of prompts that were sent, so that `kv_events` can find such prompts in token caches.

It works behind the requests' backs: a prompt is routed by what is known already, and its ids are fetched from the
/tokenize of the worker that took it while that worker computes. Nothing waits for the answer. Where many prompts wait
to be learned, further ones are left out, and a worker that has refused a few in a row (it has no /tokenize, or none for
conversations) is not asked again: `kv_events` then goes by text, as `cache_aware` does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from bough.gateway.peek import LARGE
from bough.gateway.policies.interface import RoutingRequest
from bough.gateway.policies.kv_events import KVEventsPolicy

MOST_WAITING = 64
ENOUGH_REFUSALS = 3
AT_ONCE = 4  # per gateway: tokenising costs the worker time that requests could use

# POSTs JSON to the /tokenize of the worker at a URL and gives status and answer; (0, b"") if there was none
Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]


class TokenizeResponse(msgspec.Struct):
    """What of the answer is needed."""

    tokens: list[int]


def tokenize_body(path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """What /tokenize has to be asked for the prompt of a request; None for those that it cannot tokenise."""
    messages, prompt = body.get("messages"), body.get("text") if path.endswith("/generate") else body.get("prompt")
    if isinstance(messages, list):
        system = body.get("system")  # Anthropic's place for it
        asked: dict[str, Any] = {"messages": [{"role": "system", "content": system}, *messages] if system else messages}
        if body.get("chat_template_kwargs"):
            asked["chat_template_kwargs"] = body["chat_template_kwargs"]
        return asked
    return {"prompt": prompt} if isinstance(prompt, str) else None


class PromptLearner:
    """Owns the tasks that fetch ids, and how often each worker refused."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._refusals: Counter[str] = Counter()  # in a row, by worker

    def sent(self, policy: KVEventsPolicy, worker_url: str, path: str, body: bytes, request: RoutingRequest) -> None:
        """A request was sent to a worker: learns its prompt, if that teaches anything. Returns at once."""
        if len(self._tasks) >= MOST_WAITING or self._refusals[worker_url] >= ENOUGH_REFUSALS:
            return
        if len(body) > LARGE or not policy.curious(request):
            return
        try:
            asked = tokenize_body(path, msgspec.json.decode(body, type=dict[str, Any]))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if asked is not None:
            task = asyncio.get_running_loop().create_task(self._learn(policy, worker_url, asked, request.text))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _learn(self, policy: KVEventsPolicy, worker_url: str, asked: dict[str, Any], text: str) -> None:
        async with self._turns:
            status, answer = await self._post(worker_url, msgspec.json.encode(asked))
        try:
            tokens = msgspec.json.decode(answer, type=TokenizeResponse).tokens if status == 200 else None
        except msgspec.MsgspecError:
            tokens = None
        if tokens is None:
            self._refusals[worker_url] += 1
        else:
            self._refusals.pop(worker_url, None)
            policy.learn(text, tokens)

    async def settle(self) -> None:
        """Waits until everything asked for has come."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
