"""Conversations of very many messages: bounded, and never read in quadratic time."""

from __future__ import annotations

from typing import Any

import pytest

from bough.server.anthropic.requests import CountTokensRequest, read_conversation
from bough.server.messages import MAX_VALUES, check_size
from bough.server.openai.response_items import read_input
from tests.server.test_server_native import ask

USER = {"role": "user", "content": "a"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}] * (MAX_VALUES // 2)}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": [USER] * MAX_VALUES}, "messages"),
        ("/v1/chat/completions", {"messages": [PARTS]}, "messages"),
        ("/v1/responses", {"input": [USER] * MAX_VALUES}, "input"),
        ("/tokenize", {"messages": [USER] * MAX_VALUES}, "messages"),
        ("/v1/messages", {"messages": [USER] * MAX_VALUES, "max_tokens": 1}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [PARTS]}, "messages"),
        ("/api/chat", {"messages": [USER] * MAX_VALUES}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"a": [0] * MAX_VALUES}},
            "chat_template_kwargs",
        ),
    ],
)
def test_what_nobody_could_mean_is_refused(path: str, body: dict[str, Any], field: str) -> None:
    refused = ask(body, path=path)
    assert refused.status_code == 400 and f"{field} holds more than {MAX_VALUES} values" in refused.text


def test_every_value_counts_wherever_it_stands() -> None:
    check_size([USER] * (MAX_VALUES // 3), "messages")
    with pytest.raises(Exception, match="more than"):
        check_size([USER] * (MAX_VALUES // 3 + 1), "messages")


def test_turns_in_a_row_are_joined_once() -> None:
    text = "x" * 20_000
    request = CountTokensRequest(messages=[{"role": "user", "content": text}] * 3000)
    (turn,) = read_conversation(request)  # two by two, this would copy 90 GB
    assert len(turn["content"]) == 3000 * 20_001 - 1
    said = {"role": "assistant", "content": text}
    (turn,) = read_input([CALL, *[said] * 3000, CALL])
    assert len(turn["content"]) == 3000 * 20_000 and len(turn["tool_calls"]) == 2


def test_what_was_said_twice_stays_two_turns() -> None:
    said = {"role": "assistant", "content": "a"}
    assert [turn["content"] for turn in read_input([USER, said, said])] == ["a", "a", "a"]
    assert [len(turn.get("tool_calls", ())) for turn in read_input([said, CALL, said, USER, CALL])] == [1, 0, 1]
