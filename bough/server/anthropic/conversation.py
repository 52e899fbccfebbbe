"""Anthropic's conversations as templates know them: blocks of calls, results and thinking become fields and messages of
OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.core.errors import RequestError
from bough.server.anthropic.schema import CountTokensRequest
from bough.server.messages import Message, check_size, read_content, read_message, read_messages, read_part

ROLES = ("user", "assistant", "system")


def read_conversation(request: CountTokensRequest) -> list[Message]:
    """The system prompt and the turns. Turns of the same role in a row are one, as Anthropic says."""
    opening = [] if not request.system else [{"role": "system", "content": read_content(request.system, "system")}]
    if not request.messages:
        read_messages(request.messages)  # which refuses it
    check_size(request.messages, "messages")
    runs: list[list[Message]] = []
    for turn in [*opening, *_Reader().all(request.messages)]:
        if runs and runs[-1][0]["role"] == turn["role"] != "tool":
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return [_joined(run) for run in runs]


def _joined(run: list[Message]) -> Message:
    """One turn of all; at once, because joining them two by two would copy their texts over and over."""
    joined: Message = {name: value for turn in run for name, value in turn.items()}
    for name in ("content", "reasoning_content"):
        texts = [turn[name] for turn in run if turn.get(name)]
        if texts or name == "content":
            joined[name] = "\n".join(texts)
    calls = [call for turn in run for call in turn.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


class _Reader:
    """Remembers the names of calls, because their results have only the ids."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def all(self, messages: list[dict[str, Any]]) -> list[Message]:
        return [turn for i, message in enumerate(messages) for turn in self._message(message, f"messages[{i}]")]

    def _message(self, message: Mapping[str, Any], where: str) -> list[Message]:
        content = message.get("content")
        if not isinstance(content, list):
            read = read_message(message, where, ROLES)
            return [{"role": read["role"], "content": read["content"]}]
        role = read_message({**message, "content": ""}, where, ROLES)["role"]
        texts: list[str] = []
        calls: list[Message] = []
        thoughts: list[str] = []
        results: list[Message] = []
        for i, block in enumerate(content):
            place = f"{where}.content[{i}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "tool_use" and role == "assistant":
                calls.append(self._call(block, place))
            elif kind == "tool_result" and role == "user":
                results.append(self._result(block, place))
            elif kind == "thinking" and role == "assistant":
                thoughts.append(str(block.get("thinking") or ""))
            elif kind != "redacted_thinking":
                texts.append(read_content([block], place) if kind == "text" else read_part(block, place))
        turn: Message = {"role": role, "content": "\n".join(texts)}
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
        return [*results, turn] if texts or calls or thoughts or not results else results

    def _call(self, block: Mapping[str, Any], where: str) -> Message:
        id, name, given = block.get("id"), block.get("name"), block.get("input")
        if not isinstance(id, str) or not isinstance(name, str) or not isinstance(given, Mapping):
            raise RequestError(f"{where} must have an id, a name and an input that is an object.", field=where)
        self._names[id] = name
        return {"id": id, "type": "function", "function": {"name": name, "arguments": dict(given)}}

    def _result(self, block: Mapping[str, Any], where: str) -> Message:
        id = block.get("tool_use_id")
        if not isinstance(id, str):
            raise RequestError(f"{where}.tool_use_id must be the id of a call.", field=where)
        content = read_content(block.get("content"), f"{where}.content", optional=True)
        return {"role": "tool", "tool_call_id": id, "name": self._names.get(id, ""), "content": content}
