"""OpenAI's tools: from the fields of chats and responses to a `ToolUse`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bough.core.errors import RequestError
from bough.server.openai.schema import ChatRequest, ResponsesRequest
from bough.server.tools import NO_TOOLS, Tool, ToolUse, any_of, one_of, read_function, read_functions

CHOICES = "none, auto, required, or a function by name"


def chat_tools(request: ChatRequest) -> ToolUse:
    return _choose(read_functions(request.tools), request.tool_choice, request.parallel_tool_calls, "function")


def response_tools(request: ResponsesRequest) -> ToolUse:
    """Here a function's fields stand in the tool itself."""
    return _choose(_flat_functions(request.tools), request.tool_choice, request.parallel_tool_calls, None)


def _flat_functions(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    read = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type", "function") != "function":
            kind = tool["type"]
            raise RequestError(
                f"tools[{i}]: tools of type {kind!r} are not supported by this server; give functions.", field="tools"
            )
        read.append(read_function(tool, f"tools[{i}]"))
    return read


def _choose(tools: Sequence[Tool], choice: Any, parallel: bool | None, inside: str | None) -> ToolUse:
    """`inside` is the field of a choice by name that holds the name."""
    if choice is None or choice == "auto":
        return any_of(tools, single=parallel is False)
    if choice == "none":
        any_of(tools)  # whether they make sense
        return NO_TOOLS
    if choice == "required":
        return any_of(tools, must=True, single=parallel is False)
    named = choice if inside is None or not isinstance(choice, Mapping) else choice.get(inside)
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function" and isinstance(named, Mapping):
        return one_of(tools, named.get("name"))
    raise RequestError(f"tool_choice must be {CHOICES}; got {choice!r}.", field="tool_choice")
