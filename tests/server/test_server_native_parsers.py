"""/parse_function_call and /separate_reasoning."""

from __future__ import annotations

from typing import Any

from bough.server.native.generate import text_routes
from tests.server.protocol_desk import Desk
from tests.server.tool_desk import CALL, MALFORMED, NOW, ROME, TOOL, NotingReader, say

CALLS = "/parse_function_call"
THOUGHTS = "/separate_reasoning"


def test_calls_are_found_in_a_text() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        body: dict[str, Any] = {"text": f"I look.\n{CALL}", "tools": [NOW, TOOL]}
        found = {"normal_text": "I look.", "calls": [{"tool_index": 1, "name": "get_weather", "parameters": ROME}]}
        assert await desk.post(CALLS, **body) == found
        assert await desk.post(CALLS, **body, tool_call_parser="qwen25") == found
        other = await desk.post(CALLS, **body, tool_call_parser="mistral")
        assert other == {"normal_text": body["text"], "calls": []}
        assert await desk.post(CALLS, text=MALFORMED, tools=[TOOL]) == {"normal_text": MALFORMED, "calls": []}
        error = (await desk.post(CALLS, 400, **body, tool_call_parser="qwen9"))["error"]
        assert error["param"] == "tool_call_parser" and "hermes" in error["message"]

    say(text_routes, "", use)


def test_thinking_is_told_apart() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        apart = {"reasoning_text": "Hm.", "text": "Yes."}
        assert await desk.post(THOUGHTS, text="<think>Hm.</think>Yes.") == apart
        assert await desk.post(THOUGHTS, text="<think>\nHm.\n</think>\n\nYes.\n") == apart
        assert await desk.post(THOUGHTS, text="Hm.</think>Yes.", reasoning_parser="deepseek-r1") == apart
        error = (await desk.post(THOUGHTS, 400, text="x", reasoning_parser="qwen9"))["error"]
        assert error["param"] == "reasoning_parser" and "qwen3" in error["message"]

    say(text_routes, "", use)


def test_a_server_without_parsers_asks_for_one() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        assert "tool_call_parser" in (await desk.post(CALLS, 400, text="x", tools=[]))["error"]["message"]
        assert "reasoning_parser" in (await desk.post(THOUGHTS, 400, text="x"))["error"]["message"]

    say(text_routes, "", use, tool_call_parser=None, reasoning_parser=None)
