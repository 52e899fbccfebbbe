"""Thinking and calls of a stream that breaks anywhere go on as if it had not: parsers are told what was delivered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bough.server import anthropic, openai
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from tests.server.protocol_desk import Desk
from tests.server.test_server_resuming import MARKED, Group, groups_of, resume_body
from tests.server.tool_desk import FUNCTION, MALFORMED, SCHEMA, TOOL, TWO_CALLS, NotingReader, say

MESSAGES = [{"role": "user", "content": "The weather?"}]
CHAT = {"messages": MESSAGES, "tools": [TOOL], "stream": True}
MESSAGE = {
    "messages": MESSAGES,
    "tools": [{"name": FUNCTION["name"], "input_schema": SCHEMA}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "max_tokens": 2000,
    "stream": True,
}
PROTOCOLS = [("/v1/chat/completions", CHAT, openai.routes), ("/v1/messages", MESSAGE, anthropic.routes)]


@pytest.mark.parametrize(("path", "body", "routes"), PROTOCOLS)
@pytest.mark.parametrize("answer", [f"<think>Two cities.</think>I look. {TWO_CALLS}", f"<think>Hm</think>{MALFORMED}"])
def test_thinking_and_calls_go_on(
    path: str, body: dict[str, Any], routes: Callable[[ServerContext], list[Endpoint]], answer: str
) -> None:
    async def use(desk: Desk, reader: NotingReader) -> None:
        whole = groups_of((await desk.http.post(path, json=body, headers=MARKED)).text)
        for cut in range(1, len(whole)):
            head = whole[:cut]
            rest = await desk.http.post(path, json=resume_body(path, body, head), headers=MARKED)
            assert shown(head + groups_of(rest.text)) == shown(whole), cut

    say(routes, answer, use)


def shown(groups: list[Group]) -> list[Any]:
    """What a client makes of a stream: neighbouring pieces of the same kind joined, lots drawn left out."""
    entries: list[list[str]] = []
    for event in (event for group in groups for event in group.events):
        for kind, text in pieces_of(event):
            if entries and entries[-1][0] == kind:
                entries[-1][1] += text
            else:
                entries.append([kind, text])
    return entries


def pieces_of(event: Any) -> list[tuple[str, str]]:
    if event == "[DONE]":
        return [("done", "")]
    if "choices" not in event:
        kept = {name: value for name, value in event.items() if name not in ("message", "content_block")}
        delta = dict(kept.pop("delta", {}))
        text = "".join(str(delta.pop(name, "")) for name in ("text", "thinking", "partial_json"))
        return [(json.dumps([kept, sorted(delta)]), text)]
    choice = event["choices"][0]
    delta = {name: value for name, value in choice["delta"].items() if value}
    pieces = [(name, delta[name]) for name in ("role", "reasoning_content", "content") if name in delta]
    for call in delta.get("tool_calls", ()):
        if call["function"].get("name"):
            pieces.append((f"call {call['index']}", call["function"]["name"]))
        pieces.append((f"arguments {call['index']}", call["function"].get("arguments") or ""))
    return [*pieces, ("finish", choice["finish_reason"])] if choice["finish_reason"] else pieces
