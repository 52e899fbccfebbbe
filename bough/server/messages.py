"""Checks the messages of conversations, and brings them into the form that templates expect.

Templates expect content as one string and arguments of calls as objects; OpenAI's protocol has lists of parts and JSON
text. Everything else in a message is the template's to read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bough.core.errors import RequestError
from bough.core.sampling_params import require_utf8

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# by the type of a part, the field that holds its text
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MAX_VALUES = 1 << 17  # of a conversation: reading them blocks the event loop for some tenths of a second

Message = dict[str, Any]


def read_messages(
    given: Sequence[Mapping[str, Any]] | None, field: str = "messages", roles: Sequence[str] = ROLES
) -> list[Message]:
    """The messages with their content as plain text, or an error that says which one is wrong."""
    if not given:
        raise RequestError(f"{field} is empty; give at least one message.", field=field)
    check_size(given, field)
    return [read_message(message, f"{field}[{i}]", roles) for i, message in enumerate(given)]


def check_size(given: Sequence[Any], field: str) -> None:
    """Raises for a conversation with too many parts; stops counting at the limit."""
    left: list[Any] = [given]
    count = 0
    while left:
        value = left.pop()
        inside = value.values() if isinstance(value, Mapping) else value
        count += len(inside)
        if count > MAX_VALUES:
            raise RequestError(
                f"{field} holds more than {MAX_VALUES} values (messages, their parts and fields); shorten it.",
                field=field,
            )
        left += [each for each in inside if isinstance(each, list | dict)]


def read_content(content: Any, where: str, *, optional: bool = False) -> str:
    if content is None and optional:  # an assistant's turn may be nothing but tool calls
        return ""
    if isinstance(content, list):
        content = "\n".join(read_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(f"{where} must be a string or a list of text parts.", field=where)
    require_utf8(content, where)
    return content


def text_size(messages: Sequence[Message]) -> int:
    """Characters of content: what rendering and tokenising the messages costs."""
    return sum(len(message["content"]) for message in messages)


def continues(messages: Sequence[Message]) -> bool:
    return messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def read_message(message: Mapping[str, Any], where: str, roles: Sequence[str]) -> Message:
    role = message.get("role")
    if role not in roles:
        raise RequestError(f"{where}.role must be one of {', '.join(roles)}; got {role!r}.", field=f"{where}.role")
    # OpenAI's newer name for the same thing; templates know the older one.
    read = {**message, "role": "system" if role == "developer" else role}
    read["content"] = read_content(message.get("content"), f"{where}.content", optional=role == "assistant")
    if message.get("tool_calls") is not None:
        read["tool_calls"] = _read_calls(message["tool_calls"], f"{where}.tool_calls")
    return read


def _read_calls(calls: Any, where: str) -> list[Message]:
    """The assistant's calls, with their arguments as objects; arguments that are no JSON stay text."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list of calls.", field=where)
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}[{i}] must be an object with a function that has a name.", field=f"{where}[{i}]"
            )
        arguments = function.get("arguments")
        read.append({**call, "function": {**function, "arguments": _arguments_of(arguments)}})
    return read


def joined_turns(turns: Sequence[Message], separator: str = "") -> Message:
    """Turns of one role as one; at once, because joining them two by two would copy their texts over and over."""
    joined: Message = {name: value for turn in turns for name, value in turn.items()}
    for name in ("content", "reasoning_content"):
        texts = [turn[name] for turn in turns if turn.get(name)]
        if texts or name == "content":
            joined[name] = separator.join(texts)
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


def _arguments_of(given: Any) -> Any:
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        value = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where} must be an object with a type, such as {{'type': 'text', ...}}.", field=where)
    if kind not in TEXT_PARTS:
        raise RequestError(
            f"{where}: parts of type {kind!r} are not supported by this server; send text parts only.", field=where
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{TEXT_PARTS[kind]} must be a string.", field=where)
    return text
