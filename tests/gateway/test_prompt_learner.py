"""Learning the ids of prompts behind the requests' backs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.breaker import Breaker
from bough.gateway.cache_watch import ENOUGH_REFUSALS, PromptLearner, tokenize_body
from bough.gateway.http_client import Upstream
from bough.gateway.peek import MEDIA_MARK
from bough.gateway.policies.kv_events import KVEventsPolicy
from bough.gateway.worker import Worker
from tests.fakes.routing import request

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/v1/completions", {"prompt": "Once"}, {"prompt": "Once"}),
        ("/v1/completions", {"prompt": [1, 2]}, None),
        ("/v1/completions", {"prompt": ["a", "b"]}, None),
        ("/generate", {"text": "Once"}, {"prompt": "Once"}),
        ("/generate", {"input_ids": [1]}, None),
        ("/v1/chat/completions", {"messages": [USER]}, {"messages": [USER]}),
        ("/v1/messages", {"system": "Be brief.", "messages": [USER]}, {"messages": [SYSTEM, USER]}),
        (
            "/v1/chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        ),
    ],
)
def test_what_tokenize_is_asked(path: str, body: dict[str, Any], asked: dict[str, Any] | None) -> None:
    assert tokenize_body(path, body) == asked


WORKER = Worker("http://w", Breaker(GatewaySettings()))


class Tokenizer(Upstream):
    """The way to a worker whose tokens are the bytes of the text; without a status it does not answer."""

    def __init__(self, status: int = 200) -> None:
        super().__init__()
        self.status = status
        self.asked: list[str] = []

    async def ask(self, worker: Worker, method: str, target: str, *rest: Any) -> tuple[int, bytes]:
        assert (method, target) == ("POST", "/tokenize")
        self.asked.append(worker.url)
        if not self.status:
            raise TimeoutError
        tokens = list(json.loads(rest[-1])["prompt"].encode())
        return self.status, json.dumps({"tokens": tokens, "count": len(tokens)}).encode()


def learn(worker: Tokenizer, policy: KVEventsPolicy, *texts: str) -> None:
    async def play() -> None:
        learner = PromptLearner(worker)
        for text in texts:
            learner.sent(policy, WORKER, "/v1/completions", json.dumps({"prompt": text}).encode(), request(text))
            await asyncio.gather(*learner._tasks)
        await learner.close()

    asyncio.run(play())


def test_a_prompt_is_learned_once() -> None:
    worker, policy = Tokenizer(), KVEventsPolicy()
    learn(worker, policy, "Once upon a time", "Once upon a time", "Another")
    assert worker.asked == ["http://w"] * 2
    assert not policy.curious(request("Once upon a time"))


def test_a_prompt_with_media_is_not_learned() -> None:
    worker = Tokenizer()
    learn(worker, KVEventsPolicy(), f"{MEDIA_MARK}ab12\nWho?")
    assert worker.asked == [], "a tokenizer does not know what stands in the places of media"


def test_a_body_that_is_no_json_teaches_nothing() -> None:
    async def play() -> None:
        worker = Tokenizer()
        learner = PromptLearner(worker)
        for body in (b"", b"[1]", b"{"):
            learner.sent(KVEventsPolicy(), WORKER, "/v1/completions", body, request("x"))
        await asyncio.gather(*learner._tasks)
        assert worker.asked == []

    asyncio.run(play())


@pytest.mark.parametrize("status", [404, 400, 0])
def test_a_worker_that_refuses_is_not_asked_for_ever(status: int) -> None:
    worker, policy = Tokenizer(status), KVEventsPolicy()
    learn(worker, policy, *[f"text {n}" for n in range(10)])
    assert len(worker.asked) == ENOUGH_REFUSALS
    assert policy.curious(request("text 1"))
