"""Tool calls and reasoning of an answer, in all protocols: which tools it may or must call, the grammar for them, and
which parsers its text goes through.

Each protocol reads its own fields into a `ToolUse`. `plan_answers` is called before the request is sent, because the
plan adds to the sampling parameters: markers must stay in the text, and required calls are forced by a grammar.
"""

import functools
import re
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bough import parsers
from bough.client.inputs import ThinkingMarks
from bough.client.outputs import Piece
from bough.constrained.schema_source import problems
from bough.core.errors import RequestError
from bough.core.sampling_params import GRAMMAR_FIELDS, require_few, require_utf8
from bough.core.settings import Settings
from bough.parsers import forcing
from bough.parsers.formats.base import ToolFormat
from bough.server.errors import add_field_names, client_name
from bough.server.messages import check_size
from bough.tokenizer.tokenizer import Tokenizer

NAME = re.compile(r"[\w.:/\-]{1,256}")  # so that a name cannot be taken for a marker of some format
MAX_TOOLS = 1024
MAX_CHECKED_SCHEMAS = 1 << 16  # bytes of all tools; checking as many takes a tenth of a second at most


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
        return [tool.shown for tool in self.tools] or None

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def strict_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools if tool.strict)

    def where(self, name: str, pointer: str) -> str:
        """What the client calls a place in a tool's parameters."""
        found = next(tool.where for tool in self.tools if tool.name == name)
        return f"{found}#{pointer}" if pointer else found


NO_TOOLS = ToolUse()


def read_function(function: Any, index: int, inside: str = "", schema_field: str = "parameters") -> Tool:
    """The declaration of a function, `inside` the tool with this index; its shown form has what OpenAI's has."""
    where = f"tools[{index}]{inside}"
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} must be an object with a name.", field=where)
    name, parameters, about = function.get("name"), function.get(schema_field), function.get("description")
    strict = function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        text = f"{where}.name must have 1 to 256 letters, digits and characters of _-.:/; got {name!r}."
        raise RequestError(text, field=f"{where}.name")
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


@functools.lru_cache(maxsize=256)
def _wrong_schema(schema: bytes) -> str | None:
    """What makes it no JSON schema. A request's tools are as a rule those of the last, so what was found is kept."""
    found = next(problems(msgspec.json.decode(schema)), None)
    return None if found is None else f"${found[0].replace('/', '.')}: {found[1]}"


def few(tools: Sequence[Any] | None) -> Sequence[Any]:
    """The tools, unless they are so many that reading them would hold up others."""
    require_few(tools or (), "tools", MAX_TOOLS)
    check_size(tools or (), "tools")
    return tools or ()


def check_tools(tools: Sequence[Tool], schema_field: str = "parameters") -> None:
    """The event loop waits for it: what comes after many bytes of schemas is left to a grammar, where there is one."""
    left = MAX_CHECKED_SCHEMAS
    for index, tool in enumerate(tools):
        schema = msgspec.json.encode(tool.parameters)
        left -= len(schema)
        if left < 0:
            return
        if wrong := _wrong_schema(schema):
            text = f"Tool {index} function has invalid '{schema_field}' schema: {wrong}. The tool is {tool.name!r}."
            raise RequestError(text, field=tool.where)


def read_functions(tools: Sequence[Any] | None, *, nested: bool = True) -> list[Tool]:
    """Tools in OpenAI's form: `{"type": "function", "function": {...}}`; not `nested`: the function's fields stand in
    the tool itself."""
    read: list[Tool] = []
    for i, tool in enumerate(few(tools)):
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if kind != "function":
            text = f"tools[{i}]: tools of type {kind!r} are not supported by this server; give functions."
            raise RequestError(text, field="tools")
        read.append(read_function(tool.get("function"), i, ".function") if nested else read_function(tool, i))
    check_tools(read)
    return read


def any_of(tools: Sequence[Tool], *, must: bool = False, single: bool = False) -> ToolUse:
    """The model's own choice, or, with `must`, its choice among calls."""
    twice = next((name for name, count in Counter(tool.name for tool in tools).items() if count > 1), None)
    if twice is not None:
        raise RequestError(f"tools: there are two tools called {twice!r}.", field="tools")
    if must and not tools:
        text = "tool_choice asks for a call with no tools. Tools cannot be empty if tool choice is set to required."
        raise RequestError(text, field="tool_choice")
    return ToolUse(tuple(tools), must, single)


def one_of(tools: Sequence[Tool], name: Any) -> ToolUse:
    found = [tool for tool in tools if tool.name == name]
    if not found:
        none = "none: Tools cannot be empty if tool choice is set to a specific tool"
        known = ", ".join(tool.name for tool in tools) or none
        text = f"tool_choice: Tool {name!r} not found in tools list. The list has {known}."
        raise RequestError(text, field="tool_choice")
    return any_of(found, must=True, single=True)


WITHOUT_TAGS = ("outlines-core", "outlines", "none")  # grammar back ends that know no structural tags


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Which grammar governs the calls of an answer, and which parsers its text goes through."""

    tools: ToolUse = NO_TOOLS
    calls: ToolFormat | None = None  # the format of the model's own calls
    tags: bool = True  # whether grammars may be structural tags
    tokenizer: Tokenizer | None = None
    thinking: parsers.ReasoningFormat | None = None  # how the model sets it apart
    separate: bool = True  # whether it is shown apart
    stream_reasoning: bool = True

    def grammar(self, given: Mapping[str, Any]) -> forcing.CallGrammar | None:
        """What the tools ask of the answer, beside or instead of what its request asks."""
        try:
            return self._grammar(given)
        except RecursionError:
            raise RequestError("tools: a schema is nested too deep for a grammar.", field="tools") from None

    def _grammar(self, given: Mapping[str, Any]) -> forcing.CallGrammar | None:
        tools, asked = self.tools, asked_for(given)
        if tools.must:
            if asked is not None:
                text = f"{asked} and tool_choice each say what the answer must match; give one of them."
                raise RequestError(text, field="tool_choice")
            grammar = forcing.forced_calls(self.forcible, tools.schemas, single=tools.single)
            lenient = all(tool.strict is False for tool in tools.tools)
            return replace(grammar, fields={**grammar.fields, "grammar_strict": not lenient})
        if asked is not None:
            return self._beside(asked, given[asked])
        if not self.watched or self.calls is None:
            return None
        return forcing.watched_calls(self.calls, tools.schemas, tools.strict_names, single=tools.single)

    def _beside(self, asked: str, value: Any) -> forcing.CallGrammar | None:
        """Calls, or what the request asks for; None where the request's own grammar holds alone: there
        are no tools to call, or a call could match neither."""
        tools, calls = self.tools, self.calls
        if calls is None or not tools.tools or not (self.watched or asked == "json_schema"):
            return None
        if isinstance(value, str | list) and not value:  # which is the engine's to refuse
            return None
        held = tools.strict_names if forcing.has_json_arguments(calls) else frozenset(tools.schemas)
        if not self._can_watch(held):
            return None
        otherwise = _as_format(asked, value)
        add_field_names({f"structural_tag#/format/elements/1/{key}": client_name(asked) for key in otherwise})
        return forcing.watched_calls(calls, tools.schemas, held, single=tools.single, otherwise=otherwise)

    @property
    def watched(self) -> bool:
        """Whether a call is the model's choice, but follows its grammar once it has begun: those of strict tools."""
        strict = self.tools.strict_names
        return bool(strict) and not self.tools.must and self._can_watch(strict)

    def _can_watch(self, names: Collection[str]) -> bool:
        """Not where the model writes the format with special tokens, which grammars do not see: under one it could not
        begin a call as it is used to."""
        schemas = [self.tools.schemas[name] for name in names]
        if not self.tags or not forcing.can_watch(self.calls, schemas):
            return False
        if self.calls is None or self.calls.shape is None or self.tokenizer is None:
            return True
        texts = self.tokenizer.encode_batch(self.calls.shape.markers, add_special_tokens=False)
        return not any(self.tokenizer.special_ids.intersection(ids) for ids in texts)

    @property
    def assured(self) -> frozenset[str]:
        """The tools whose calls follow a grammar, so that they cannot turn out to be text."""
        if self.tools.must:
            return frozenset(self.tools.schemas)
        return self.tools.strict_names if self.watched else frozenset()

    @property
    def forcible(self) -> ToolFormat | None:
        """The format of calls that must come; None where they are a list."""
        return self.calls if self.tags else None

    @property
    def reasoning(self) -> parsers.ReasoningFormat | None:
        return self.thinking if self.separate else None

    def marks(
        self, sampling: Mapping[str, Any], prompt: str, continued: str = "", budget: int | None = None
    ) -> ThinkingMarks | None:
        """How the engine finds the thinking: a grammar applies after it, and a budget cuts it short."""
        kind = self.thinking
        if kind is None:
            if budget is not None:
                raise unknown_thinking("max_thinking_tokens")
            return None
        begun = kind.thinks_from_start(prompt, continued)
        switched_off = not begun and prompt.rstrip().endswith(kind.end)
        if switched_off or (budget is None and asked_for(sampling) is None):
            return None
        return ThinkingMarks(kind.start, kind.end, kind.cut, begun, budget)

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters with what the plan adds to them. A client may hide markers itself. Errors and
        warnings about the grammar of the tools name the tools."""
        added: dict[str, Any] = {}
        if self.reasoning is not None or self.tools.tools:
            added["skip_special_tokens"] = False
        if given.get("skip_special_tokens") is not None:
            added.pop("skip_special_tokens", None)
        grammar = self.grammar(given)
        if grammar is None:
            return {**given, **added}
        add_field_names({place: self.tools.where(*found) for place, found in grammar.places.items()})
        add_field_names({name: "tools" for name in grammar.fields if name in GRAMMAR_FIELDS})
        kept = {name: value for name, value in given.items() if name not in GRAMMAR_FIELDS}
        return {**kept, **added, **grammar.fields}

    def answers(self, prompt: str = "", continued: str = "") -> parsers.AnswerFormat:
        """How answers to a prompt are read; `continued` is the assistant's text that they continue."""
        calls = None
        if self.tools.tools:
            calls = forcing.forced_format(self.forcible) if self.tools.must else self.calls
        return parsers.AnswerFormat(
            reasoning=self.reasoning,
            thinking=self.reasoning is not None and self.reasoning.thinks_from_start(prompt, continued),
            stream_reasoning=self.stream_reasoning,
            tool_format=calls,
            tools=self.tools.schemas,
            most_calls=1 if self.tools.single else None,
            eager=self.assured.union(tool.name for tool in self.tools.tools if tool.eager),
            openings=forcing.forced_openings(self.forcible, self.tools.schemas) if self.tools.must else (),
        )


def unknown_thinking(field: str) -> RequestError:
    """For a field that needs the server to tell its model's thinking apart."""
    problem = f"{field} needs a server that knows how its model thinks"
    return RequestError(f"{problem}; start it with --reasoning-parser.", field=field)


def asked_for(sampling: Mapping[str, Any]) -> str | None:
    return next((name for name in GRAMMAR_FIELDS if sampling.get(name) is not None), None)


def _as_format(name: str, asked: Any) -> dict[str, Any]:
    """What a field asks for, as a format inside of a structural tag."""
    match name:
        case "json_schema":
            return {"type": "json_schema", "json_schema": asked}
        case "regex":
            return {"type": "regex", "pattern": asked}
        case "ebnf":
            return {"type": "grammar", "grammar": asked}
        case "choices":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in asked]}
    problem = f"{name} and tools that are strict each say what the answer must match; set strict to false."
    raise RequestError(problem, field=name)


def plan_answers(
    settings: Settings,
    tools: ToolUse = NO_TOOLS,
    tokenizer: Tokenizer | None = None,
    *,
    separate: bool = True,
    stream_reasoning: bool = True,
) -> AnswerPlan:
    """The plan of a request, by the server's parsers and the model's tokenizer. `separate`: thinking is shown apart
    where there is a parser."""
    calls, thinking = settings.model.tool_call_parser, settings.model.reasoning_parser
    if tools.tools and not tools.must and calls is None:
        advice = "tools need a server that knows how its model writes calls; start it with --tool-call-parser,"
        raise RequestError(f"{advice} or force a call with tool_choice.", field="tools")
    return AnswerPlan(
        tools=tools,
        thinking=None if thinking is None else parsers.reasoning_format(thinking),
        separate=separate,
        stream_reasoning=stream_reasoning,
        calls=None if calls is None else parsers.tool_format(calls),
        tags=settings.scheduler.grammar_backend not in WITHOUT_TAGS,
        tokenizer=tokenizer,
    )


class CallIds:
    """Names the calls of one answer: by the model's own ids where it gives unique ones, else random."""

    def __init__(self, prefix: str = "call_") -> None:
        self._prefix = prefix
        self._taken: set[str] = set()

    def name(self, call: parsers.Call | parsers.CallBegin) -> str:
        chosen = call.id if call.id and call.id not in self._taken else f"{self._prefix}{uuid.uuid4().hex[:24]}"
        self._taken.add(chosen)
        return chosen


class StreamParser:
    def __init__(self, form: parsers.AnswerFormat) -> None:
        self.called = False  # it has made a complete call
        self.ids = CallIds()
        self._parser = None if form.plain else parsers.AnswerParser(form)
        self._reasoning: list[str] = []

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def events(self, piece: Piece) -> list[parsers.Event]:
        events = self.replay(piece.text)
        if piece.finish is not None and self._parser is not None:
            events += self._noted(self._parser.finish())
        return events

    def replay(self, text: str) -> list[parsers.Event]:
        """The events of text alone, such as what was delivered before the stream was resumed."""
        if self._parser is None:
            return [parsers.Text(text)] if text else []
        return self._noted(self._parser.feed(text) if text else [])

    def _noted(self, events: list[parsers.Event]) -> list[parsers.Event]:
        for event in events:
            if isinstance(event, parsers.CallEnd):
                self.called = True
            elif isinstance(event, parsers.Reasoning):
                self._reasoning.append(event.text)
        return events
