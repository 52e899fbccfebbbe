"""OpenAI's tools: from the fields of chats and responses to a `ToolUse`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bough.core.errors import RequestError
from bough.server.openai.schema import ChatRequest, ResponsesRequest
from bough.server.tools import NO_TOOLS, Tool, ToolUse, any_of, one_of, read_function, read_functions

CHOICES = "none, auto, required, allowed_tools, or a function by name"

MODES = ("auto", "required")


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
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _choose_among(tools, choice, parallel, inside)
    named = choice if inside is None or not isinstance(choice, Mapping) else choice.get(inside)
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function" and isinstance(named, Mapping):
        return one_of(tools, named.get("name"))
    raise RequestError(f"tool_choice must be {CHOICES}; got {choice!r}.", field="tool_choice")


def _choose_among(
    tools: Sequence[Tool], choice: Mapping[str, Any], parallel: bool | None, inside: str | None
) -> ToolUse:
    """`allowed_tools`: a choice among some of the tools."""
    said = choice if inside is None else choice.get("allowed_tools")
    named = said.get("tools") if isinstance(said, Mapping) else None
    if not isinstance(said, Mapping) or not isinstance(named, list) or said.get("mode", "auto") not in MODES:
        raise RequestError(
            "tool_choice of type allowed_tools needs a mode, auto or required, and a list of tools.",
            field="tool_choice",
        )
    functions = [each if inside is None or not isinstance(each, Mapping) else each.get(inside) for each in named]
    names = [each.get("name") if isinstance(each, Mapping) else None for each in functions]
    for name in names:
        one_of(tools, name)  # which says what is wrong with it
    allowed = [tool for tool in tools if tool.name in names]
    return any_of(allowed, must=said.get("mode") == "required", single=parallel is False)
