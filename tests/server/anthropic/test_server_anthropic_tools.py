"""Tools and thinking in Anthropic's protocol: blocks, choices, streams, histories."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bough.server.anthropic import routes
from tests.server.protocol_desk import Desk
from tests.server.tool_desk import CALL, MALFORMED, OSLO, ROME, SCHEMA, TWO_CALLS, NotingReader, say

PATH = "/v1/messages"
TOOL = {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}
ASK: dict[str, Any] = {"max_tokens": 500, "messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL]}
DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def rebuilt(events: list[Any]) -> list[dict[str, Any]]:
    """The blocks that a stream amounts to."""
    blocks: list[dict[str, Any]] = []
    raw: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                raw[event["index"]] = raw.get(event["index"], "") + delta["partial_json"]
            elif delta["type"] != "signature_delta":
                kind, name = DELTAS[block["type"]]
                assert delta["type"] == kind
                block[name] += delta[name]
    for index, text in raw.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize("cuts", [None, [], [5, 30]])
def test_blocks_whole_and_streamed(cuts: list[int] | None) -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "get_weather", "input": json.loads(ROME)},
        {"type": "tool_use", "name": "get_weather", "input": json.loads(OSLO)},
        {"type": "text", "text": "Done."},
    ]

    async def use(desk: Desk, notes: NotingReader) -> None:
        whole = await desk.post(PATH, **ASK)
        assert whole["stop_reason"] == "tool_use"
        assert without_ids(whole["content"]) == blocks
        ids = [block["id"] for block in whole["content"] if "id" in block]
        assert len(set(ids)) == 2 and all(id.startswith("toolu_") for id in ids)
        events = await desk.stream(PATH, **ASK)
        assert without_ids(rebuilt(events)) == blocks
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert '"get_weather"' in desk.prompt

    say(routes, f"<think>Hm.</think>Let me see.\n{TWO_CALLS}\nDone.", use, cuts=cuts)


def test_malformed_calls_are_text() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        whole = await desk.post(PATH, **ASK)
        assert (whole["content"], whole["stop_reason"]) == ([{"type": "text", "text": MALFORMED}], "end_turn")
        events = await desk.stream(PATH, **ASK)
        assert events[-2]["delta"]["stop_reason"] == "end_turn"
        said = [e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta"]
        assert "".join(said) == MALFORMED
        assert rebuilt(events) == whole["content"]

    say(routes, MALFORMED, use)


@pytest.mark.parametrize("cuts", [None, [], [5, 30, 90, 120]])
def test_blocks_are_the_same_however_a_stream_is_cut(cuts: list[int] | None) -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        whole = await desk.post(PATH, **ASK)
        assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "text"]
        assert without_ids(rebuilt(await desk.stream(PATH, **ASK))) == without_ids(whole["content"])

    say(routes, f"{MALFORMED}\n{CALL}\n{MALFORMED}", use, cuts=cuts)


def test_a_client_may_want_its_arguments_as_they_come() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        for eager in (False, True):
            tool = {**TOOL, "eager_input_streaming": eager}
            events = await desk.stream(PATH, **{**ASK, "tools": [tool]})
            pieces = [e for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
            assert len(pieces) > 10 if eager else len(pieces) == 1

    say(routes, CALL, use)


def test_an_answer_without_words_has_an_empty_block() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        assert (await desk.post(PATH, **ASK))["content"] == [{"type": "text", "text": ""}]
        assert rebuilt(await desk.stream(PATH, **ASK)) == [{"type": "text", "text": ""}]

    say(routes, "", use)


@pytest.mark.parametrize(
    ("choice", "single"),
    [
        ({"type": "any"}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
        ({"type": "tool", "name": "get_weather"}, True),
    ],
)
def test_calls_that_must_come_are_forced_by_a_grammar(choice: dict[str, Any], single: bool) -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post(PATH, **ASK, tool_choice=choice)
        assert notes.grammar["structural_tag"]["format"]["stop_after_first"] is single

    say(routes, CALL, use)


def test_choices_that_leave_it_to_the_model() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        for choice, called in (({"type": "auto"}, True), ({"type": "none"}, False)):
            whole = await desk.post(PATH, **ASK, tool_choice=choice)
            assert not notes.grammar and (whole["stop_reason"] == "tool_use") is called
        for wrong in ({"type": "tool", "name": "f"}, {"type": "maybe"}, {"type": "any"}):
            body = {**ASK, "tools": []} if wrong["type"] == "any" else ASK
            assert "tool_choice" in (await desk.post(PATH, 400, **body, tool_choice=wrong))["error"]["message"]

    say(routes, CALL, use)


def test_histories_with_calls_results_and_thinking() -> None:
    use_block = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": json.loads(ROME)}
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                use_block,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain."}]},
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "user", "content": "Well?"},
    ]

    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post(PATH, **{**ASK, "messages": messages})
        assert desk.prompt.split("\n")[1:-1] == [
            "user: Weather?",
            f"assistant: I look. thought Hm. called get_weather {ROME}",
            "tool(get_weather t1): Rain.",
            "user: So?",
            "Well?",
        ]
        counted = await desk.post(f"{PATH}/count_tokens", messages=messages, tools=[TOOL])
        assert counted["input_tokens"] == len(desk.prompt)

    say(routes, "Fine.", use)


def test_thinking() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        body = {**ASK, "tools": None}
        shown = await desk.post(PATH, **body, thinking={"type": "enabled", "budget_tokens": 1024})
        assert desk.prompt.endswith("<think>")
        assert [block["type"] for block in shown["content"]] == ["thinking", "text"]
        assert notes.thinking is not None and notes.thinking.budget == 1024 and notes.thinking.begun
        assert (
            "budget_tokens"
            in (await desk.post(PATH, 400, **body, thinking={"type": "enabled", "budget_tokens": "much"}))["error"][
                "message"
            ]
        )
        await desk.post(PATH, **body, thinking={"type": "disabled"})
        assert desk.prompt.endswith("assistant: ")
        assert "thinking.type" in (await desk.post(PATH, 400, **body, thinking={"type": "deep"}))["error"]["message"]

    say(routes, "Hm.</think>Yes.", use)
