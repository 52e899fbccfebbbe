"""Tools and thinking in Ollama's protocol."""

from __future__ import annotations

import json
from typing import Any

from bough.server.ollama import routes
from tests.server.protocol_desk import Desk
from tests.server.tool_desk import MALFORMED, OSLO, ROME, TOOL, TWO_CALLS, NotingReader, say

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL]}
CALLS = [{"function": {"name": "get_weather", "arguments": json.loads(text)}} for text in (ROME, OSLO)]


async def lines_of(desk: Desk, path: str, **body: Any) -> list[Any]:
    answer = await desk.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_calls_and_thinking_whole_and_in_lines() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        whole = await desk.post("/api/chat", **ASK, stream=False)
        message = {"role": "assistant", "content": "Let me see.", "thinking": "Hm.", "tool_calls": CALLS}
        assert whole["message"] == message and whole["done_reason"] == "stop"
        lines = await lines_of(desk, "/api/chat", **ASK)
        said = [line["message"] for line in lines]
        assert "".join(each["content"] for each in said) == "Let me see."
        assert "".join(each.get("thinking", "") for each in said) == "Hm."
        assert [call for each in said for call in each.get("tool_calls", ())] == CALLS
        assert '"get_weather"' in desk.prompt

    say(routes, f"<think>Hm.</think>Let me see.\n{TWO_CALLS}", use)


def test_malformed_calls_are_text() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        whole = await desk.post("/api/chat", **ASK, stream=False)
        assert whole["message"] == {"role": "assistant", "content": MALFORMED}
        lines = await lines_of(desk, "/api/chat", **ASK)
        assert "".join(line["message"]["content"] for line in lines) == MALFORMED

    say(routes, MALFORMED, use)


def test_thinking_on_and_off() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        for think in (True, "high"):
            answer = await desk.post("/api/generate", prompt="Count.", think=think, stream=False)
            assert desk.prompt.endswith("<think>")
            assert (answer["thinking"], answer["response"]) == ("Hm.", "Yes.")
        answer = await desk.post("/api/generate", prompt="Count.", think=False, stream=False)
        assert not desk.prompt.endswith("<think>") and "thinking" not in answer
        shown = await desk.post("/api/show", model="any")
        assert shown["capabilities"] == ["completion", "tools", "thinking"]

    say(routes, "Hm.</think>Yes.", use)


def test_histories_and_what_is_missing() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALLS[0]]},
        {"role": "tool", "tool_name": "get_weather", "content": "Rain."},
    ]

    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post("/api/chat", messages=messages, stream=False)
        assert f"called get_weather {ROME}\ntool: Rain." in desk.prompt
        assert "--tool-call-parser" in (await desk.post("/api/chat", 400, **ASK))["error"]
        assert "--reasoning-parser" in (await desk.post("/api/generate", 400, prompt="x", think=True))["error"]

    say(routes, "Fine.", use, tool_call_parser=None, reasoning_parser=None)
