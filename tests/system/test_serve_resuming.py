"""Streams of the default model that break over real HTTP and are resumed from their tokens, on every route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.system.serving import PATIENCE_S

CHAT = [{"role": "user", "content": "Tell me a story about Ada."}]
STORY = {"prompt": "Once upon a time, there was"}
PENALTY = {"frequency_penalty": 0.4, "seed": 5}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": STORY["prompt"], "sampling_params": {"max_new_tokens": 20, "temperature": 0}}),
    ("/generate", {"text": STORY["prompt"], "sampling_params": {"max_new_tokens": 20, "temperature": 0.8}}),
    ("/v1/completions", {**STORY, "max_tokens": 20, "temperature": 0, "stop": [" forest"]}),
    ("/v1/completions", {**STORY, "max_tokens": 20, "temperature": 1, **PENALTY}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 20, "temperature": 0}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 20, "temperature": 1, **PENALTY}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 20, "temperature": 0}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 20, "temperature": 1}),
]


@pytest.fixture
def http(model_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=model_url, timeout=PATIENCE_S) as client:
        yield client


class Broken:
    """What came of a stream before it broke, or before it ended."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.ids: list[int] = []
        self.seed: int | None = None

    def read(self, http: httpx.Client, path: str, body: dict[str, Any], tokens: int = 10**9) -> None:
        """Leaves the connection behind when it has so many tokens."""
        headers = {"X-Bough-Resume": "1"}
        with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith(": ids "):
                    self.ids += map(int, line[6:].split(","))
                elif line.startswith(": seed "):
                    self.seed = int(line[7:])
                elif line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
                    if len(self.ids) >= tokens:
                        return

    @property
    def identity(self) -> dict[str, Any]:
        first = self.events[0]
        if "meta_info" in first:
            return {"id": first["meta_info"]["id"]}
        return {"id": first["message"]["id"]} if "message" in first else {k: first[k] for k in ("id", "created")}

    @property
    def text(self) -> str:
        if "meta_info" in self.events[0]:
            return str(self.events[-1]["text"])
        return "".join(map(_new_text, self.events))

    @property
    def finish(self) -> Any:
        last = self.events[-2] if "type" in self.events[-1] else self.events[-1]
        if "meta_info" in last:
            return last["meta_info"]["finish_reason"]
        return last["delta"] if "delta" in last else last["choices"][0]["finish_reason"]


def _new_text(event: dict[str, Any]) -> str:
    if "choices" in event:
        choice = event["choices"][0]
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return str(event.get("delta", {}).get("text", ""))


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_stream_goes_on_where_it_broke(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    stream = Broken()
    stream.read(http, path, body, tokens=7)
    seed = {} if "seed" in body or body.get("temperature") == 0 else {"seed": stream.seed}
    head = list(stream.ids)
    assert len(head) >= 7 and stream.seed is not None
    stream.read(http, path, {**body, "resume": {"output_ids": head, **stream.identity, **seed}})
    undisturbed = Broken()
    undisturbed.read(http, path, {**body, "resume": {"output_ids": [], **stream.identity, "seed": stream.seed}})
    assert stream.ids == undisturbed.ids and len(stream.ids) > len(head)
    assert (stream.text, stream.finish) == (undisturbed.text, undisturbed.finish)


def test_a_wrong_resume_is_a_400_of_its_protocol(http: httpx.Client) -> None:
    for path, body in (ROUTES[0], ROUTES[4], ROUTES[6]):
        answer = http.post(path, json={**body, "stream": True, "resume": {"output_ids": [10**6]}})
        assert answer.status_code == 400 and "resume.output_ids" in answer.json()["error"]["message"]
