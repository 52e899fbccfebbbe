"""What a request says of tools, the same for all protocols: which the model may call, and whether it must.

Each protocol reads its own fields into a `ToolUse`; what becomes of it (the template, the grammar, the parser) is
`parsing`'s matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bough.core.errors import RequestError
from bough.core.sampling_params import require_utf8

NAME = re.compile(r"[\w.:/\-]{1,256}")  # so that a name cannot be taken for a marker of some format


@dataclass(frozen=True, slots=True)
class Tool:
    """One function, and how it is shown to the template."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema
    shown: Mapping[str, Any]  # in OpenAI's form, which is what templates know
    where: str = "tools"  # what the client calls the schema
    strict: bool | None = None  # whether the arguments must match it; None: the client does not say
    eager: bool = False  # its calls are shown while they are written, though they may turn out to be text


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call; none, where it may not. `must`: it is nothing but calls."""

    tools: tuple[Tool, ...] = ()
    must: bool = False
    single: bool = False  # at most one call

    @property
    def shown(self) -> list[Mapping[str, Any]] | None:
        """What the template is given."""
        return [tool.shown for tool in self.tools] or None

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def strict_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools if tool.strict)

    @property
    def eager_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools if tool.eager)

    def where(self, name: str, pointer: str) -> str:
        """What the client calls a place in a tool's parameters."""
        found = next(tool.where for tool in self.tools if tool.name == name)
        return f"{found}#{pointer}" if pointer else found


NO_TOOLS = ToolUse()


def read_function(function: Any, where: str, schema_field: str = "parameters") -> Tool:
    """A function's declaration; its shown form has what OpenAI's has."""
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} must be an object with a name.", field=where)
    name, parameters, about = function.get("name"), function.get(schema_field), function.get("description")
    strict = function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name must have 1 to 256 letters, digits and characters of _-.:/; got {name!r}.",
            field=f"{where}.name",
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.{schema_field} must be a JSON schema.", field=f"{where}.{schema_field}")
    if about is not None and not isinstance(about, str):
        raise RequestError(f"{where}.description must be a string.", field=f"{where}.description")
    require_utf8(about or "", f"{where}.description")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{where}.strict must be true or false.", field=f"{where}.strict")
    schema = parameters or {"type": "object", "properties": {}}
    shown = {"name": name, "description": about or "", "parameters": schema}
    return Tool(name, schema, {"type": "function", "function": shown}, f"{where}.{schema_field}", strict)


def read_functions(tools: Sequence[Any] | None, where: str = "tools") -> list[Tool]:
    """Tools in OpenAI's form: `{"type": "function", "function": {...}}`."""
    read = []
    for i, tool in enumerate(tools or ()):
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise RequestError(
                f"{where}[{i}]: tools of type {kind!r} are not supported by this server; give functions.", field=where
            )
        read.append(read_function(tool.get("function"), f"{where}[{i}].function"))
    return read


def any_of(tools: Sequence[Tool], *, must: bool = False, single: bool = False, field: str = "tool_choice") -> ToolUse:
    """The model's own choice, or, with `must`, its choice among calls."""
    names = [tool.name for tool in tools]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise RequestError(f"tools: there are two tools called {twice!r}.", field="tools")
    if must and not tools:
        raise RequestError(f"{field} asks for a call, but there are no tools.", field=field)
    return ToolUse(tuple(tools), must, single)


def one_of(tools: Sequence[Tool], name: Any, field: str = "tool_choice") -> ToolUse:
    """A call of the tool by this name."""
    found = [tool for tool in tools if tool.name == name]
    if not found:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise RequestError(f"{field}: there is no tool {name!r} among the tools ({known}).", field=field)
    return any_of(found, must=True, single=True)
