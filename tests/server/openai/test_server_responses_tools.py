"""Tools and thinking of responses: items whole, streamed and continued."""

from __future__ import annotations

from typing import Any

import pytest

from bough.server.openai import routes
from tests.server.protocol_desk import Desk
from tests.server.tool_desk import (
    CALL,
    MALFORMED,
    OSLO,
    ROME,
    SCHEMA,
    TWO_CALLS,
    NotingReader,
    say,
)

FLAT = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": SCHEMA}


def test_responses_with_calls_whole_streamed_and_continued() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        body: dict[str, Any] = {"input": "Weather?", "tools": [FLAT]}
        first = await desk.post("/v1/responses", **body)
        thought, said, *calls = first["output"]
        assert thought["type"] == "reasoning" and thought["content"][0]["text"] == "Hm."
        assert said["type"] == "message" and said["content"][0]["text"] == "Let me see."
        assert [(call["type"], call["arguments"], call["status"]) for call in calls] == [
            ("function_call", ROME, "completed"),
            ("function_call", OSLO, "completed"),
        ]
        assert len({item["id"] for item in first["output"]}) == 4
        assert first["tools"] == [FLAT] and first["tool_choice"] == "auto"
        assert first["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
        events = await desk.stream("/v1/responses", **body)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [item["arguments"] for item in events[-1]["response"]["output"][2:]] == [ROME, OSLO]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
        assert "".join(e["delta"] for e in deltas if e["output_index"] == 2) == ROME
        result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "Rain."}
        await desk.post("/v1/responses", input=[result], previous_response_id=first["id"])
        assert f"called get_weather {ROME} called get_weather {OSLO}" in desk.prompt
        assert f"tool( {calls[0]['call_id']}): Rain." in desk.prompt

    say(routes, f"<think>Hm.</think>Let me see.\n{TWO_CALLS}", use)


def test_items_of_calls_and_thinking_are_one_turn() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": ROME},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
    ]

    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post("/v1/responses", input=items)
        assert desk.prompt.split("\n")[1:3] == [
            f"assistant:  thought Hm. called get_weather {ROME}",
            "tool(get_weather c1): Rain.",
        ]
        for choice in ("required", {"type": "function", "name": "get_weather"}):
            await desk.post("/v1/responses", input="x", tools=[FLAT], tool_choice=choice)
            assert "structural_tag" in notes.grammar
        for wrong in ({"type": "function_call"}, {"type": "function_call_output"}):
            error = (await desk.post("/v1/responses", 400, input=[wrong]))["error"]
            assert error["param"] == "input[0]"

    say(routes, "Fine.", use)


def test_a_malformed_call_in_a_response_is_text() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        body: dict[str, Any] = {"input": "Weather?", "tools": [FLAT]}
        (message,) = (await desk.post("/v1/responses", **body))["output"]
        assert message["content"][0]["text"] == MALFORMED
        (shown,) = (await desk.stream("/v1/responses", **body))[-1]["response"]["output"]
        assert shown["content"][0]["text"] == MALFORMED

    say(routes, MALFORMED, use)


@pytest.mark.parametrize("cuts", [None, [], [5, 30, 90, 120]])
def test_a_response_has_the_same_items_however_its_stream_is_cut(cuts: list[int] | None) -> None:
    def told(items: list[Any]) -> list[Any]:
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]

    async def use(desk: Desk, notes: NotingReader) -> None:
        body: dict[str, Any] = {"input": "Weather?", "tools": [FLAT]}
        whole = await desk.post("/v1/responses", **body)
        assert [item["type"] for item in whole["output"]] == ["message", "function_call", "message"]
        events = await desk.stream("/v1/responses", **body)
        assert told(events[-1]["response"]["output"]) == told(whole["output"])
        added = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
        assert added == ["message", "function_call", "message"]

    say(routes, f"{MALFORMED}\n{CALL}\n{MALFORMED}", use, cuts=cuts)
