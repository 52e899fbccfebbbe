"""The conversation of a response: from input items to messages, and from output items back to what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bough.core.errors import RequestError
from bough.server.messages import ROLES, Message, check_size, read_content, read_message, read_messages
from bough.server.openai.response_objects import FunctionCallItem, Item, OutputMessage, ReasoningItem

KINDS = ("message", "function_call", "function_call_output", "reasoning")


def read_input(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """The new turns of the conversation. Calls and thinking that follow each other are one turn of the assistant's."""
    if isinstance(given, str):
        return read_messages([{"role": "user", "content": given}], "input")
    if not given:
        read_messages(given, "input")  # which refuses it
    check_size(given, "input")
    names = {item.get("call_id"): item.get("name") for item in given if item.get("type") == "function_call"}
    runs: list[_Run] = []
    for i, item in enumerate(given):
        turn = _read_item(item, f"input[{i}]", names)
        if not runs or not runs[-1].takes(turn):
            runs.append(_Run())
        runs[-1].add(turn)
    return [run.joined() for run in runs]


def said_in(output: Sequence[Item]) -> list[Message]:
    """What the assistant said with these items, for the turns that follow. What failed to be a call is text, too."""
    run = _Run()
    for item in output:
        match item:
            case OutputMessage():
                turn: Message = {"role": "assistant", "content": "".join(part.text for part in item.content)}
            case FunctionCallItem() if item.status != "completed":
                continue
            case FunctionCallItem():
                turn = _call_turn(item.call_id, item.name, item.arguments, "output")
            case ReasoningItem():
                turn = _thinking_turn("".join(part.text for part in item.content))
        run.add(turn)
    return [run.joined()] if run.turns else []


def _read_item(item: Mapping[str, Any], where: str, names: Mapping[Any, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        read = read_message(item, where, ROLES)
        return {"role": read["role"], "content": read["content"]}
    if kind == "function_call":
        return _call_turn(item.get("call_id"), item.get("name"), item.get("arguments"), where)
    if kind == "function_call_output":
        id = item.get("call_id")
        if not isinstance(id, str):
            raise RequestError(f"{where}.call_id must be the id of a call.", field=where)
        content = read_content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": id, "name": names.get(id) or "", "content": content}
    if kind == "reasoning":
        parts = item.get("content") or ()
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        return _thinking_turn("".join(text for text in texts if isinstance(text, str)))
    raise RequestError(
        f"{where}: items of type {kind!r} are not supported by this server; send {', '.join(KINDS)}.", field=where
    )


def _call_turn(id: Any, name: Any, arguments: Any, where: str) -> Message:
    if not isinstance(id, str) or not isinstance(name, str):
        raise RequestError(f"{where} must have a call_id and a name.", field=where)
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return read_message({"role": "assistant", "content": "", "tool_calls": [call]}, where, ROLES)


def _thinking_turn(text: str) -> Message:
    return {"role": "assistant", "content": "", "reasoning_content": text}


class _Run:
    """Turns that are one. Joined at once: two by two, their texts would be copied over and over."""

    def __init__(self) -> None:
        self.turns: list[Message] = []
        self._more_than_said = False  # there is a call, or thinking, among them

    def takes(self, turn: Message) -> bool:
        """Whether the turn belongs here, too: all the assistant's, and not two things that were said."""
        both = self.turns[-1]["role"] == turn["role"] == "assistant"
        return both and (self._more_than_said or _more_than_said(turn))

    def add(self, turn: Message) -> None:
        self.turns.append(turn)
        self._more_than_said = self._more_than_said or _more_than_said(turn)

    def joined(self) -> Message:
        joined: Message = {name: value for turn in self.turns for name, value in turn.items()}
        joined["content"] = "".join(turn["content"] for turn in self.turns)
        calls = [call for turn in self.turns for call in turn.get("tool_calls", ())]
        return {**joined, "tool_calls": calls} if calls else joined


def _more_than_said(turn: Message) -> bool:
    return "tool_calls" in turn or "reasoning_content" in turn
