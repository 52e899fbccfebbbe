"""Formats that write a call as JSON, `{"name": ..., "arguments": {...}}`, alone or in a list, mostly inside tags."""

import json
from collections.abc import Callable

from bough.parsers.events import Text
from bough.parsers.formats.base import BlockFormat, Calls, OneCall, Shape, ToolFormat, attempt, read_calls
from bough.parsers.json_text import json_value
from bough.parsers.source import SPACE, MalformedError, Markers, Source, Steps
from bough.parsers.values import read_json, to_json

NAME = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters", "args")
IGNORED = ("id", "type", "tool_call_id")


def call_object(source: Source, calls: Calls) -> Steps[None]:
    """One call. Its members come in any order; arguments that come before the name wait for it."""
    name: str | None = None
    given = False
    waiting = ""
    yield from source.expect("{")
    while True:
        key = yield from _key(source)
        if key in NAME and name is None:
            name = yield from _string(source)
            yield calls.begin(name)
            if waiting:
                yield calls.arguments(waiting)
        elif key in ARGUMENTS and not given:
            given = True
            first = yield from source.peek()
            if first == "n":
                yield from source.expect("null")
                given = False
            elif first == '"':
                waiting = yield from _quoted_object(source)
                if name is not None:
                    yield calls.arguments(waiting)
            elif name is not None:
                yield from calls.json_arguments(source)
            elif first == "{":
                waiting = yield from json_value(source)
            else:
                raise MalformedError("arguments that are no object")
        elif key in IGNORED:
            yield from json_value(source)
        else:
            raise MalformedError(f"what is {key!r}")
        yield from source.skip_space()
        if not (yield from source.skip(",")):
            break
    yield from source.expect("}")
    if name is None:
        raise MalformedError("no name")
    if not given:
        yield calls.arguments("{}")
    yield calls.end()


def call_list(source: Source, calls: Calls, call: OneCall = call_object) -> Steps[None]:
    yield from source.expect_after_space("[")
    yield from read_calls(source, calls, call, "]", separator=",")


def _quoted_object(source: Source) -> Steps[str]:
    """The JSON of an object, which some models write as a string."""
    text = yield from _string(source)
    try:
        value = read_json(text)
        if isinstance(value, dict):
            return to_json(value)
    except (ValueError, RecursionError):
        pass
    raise MalformedError("arguments that are no object")


def _key(source: Source) -> Steps[str]:
    yield from source.skip_space()
    key = yield from _string(source)
    yield from source.expect_after_space(":")
    yield from source.skip_space()
    return key


def _string(source: Source) -> Steps[str]:
    if (yield from source.peek()) != '"':
        raise MalformedError("no string")
    text = yield from json_value(source)
    value: str = json.loads(text)
    return value


class JsonList(ToolFormat):
    """A list of calls as the whole answer: how a call is forced where the model's own format cannot be."""

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        if (yield from source.starts_after_space("[")):
            source.mark()
            yield from attempt(source, calls, call_list(source, calls))
        yield from source.rest(Text)


class TaggedJson(BlockFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, others with other tags."""

    def __init__(self, opening: str, closing: str, *, arguments: str = "arguments") -> None:
        self.OPENING = Markers(opening, before=SPACE)
        self._closing = closing
        self.shape = Shape(
            begin=lambda name: f'{opening}\n{{"name": {json.dumps(name)}, "{arguments}": ',
            end=f"}}\n{closing}",
            between="\n",
            trigger=opening,
        )

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from source.skip_space()
        yield from call_object(source, calls)
        yield from source.close(self._closing)


HERMES = TaggedJson("<tool_call>", "</tool_call>")
INTERN_S1 = TaggedJson("<|action_start|> <|plugin|>", "<|action_end|>", arguments="parameters")


class GigaChat(BlockFormat):
    """GigaChat 3: a message of the role `function call`, or `<|function_call|>`, and then a call."""

    SEPARATOR, ROLE, INLINE = "<|message_sep|>", "function call<|role_sep|>", "<|function_call|>"
    OPENING = Markers(SEPARATOR, ROLE, INLINE, before=SPACE)
    shape = Shape(
        begin=lambda name: f'function call<|role_sep|>\n{{"name": {json.dumps(name)}, "arguments": ',
        end="}",
        trigger=ROLE,
    )

    def block(self, source: Source, calls: Calls, marker: str) -> Steps[None]:
        if marker == self.SEPARATOR:
            yield from source.skip_space()
            if not (yield from source.skip(self.ROLE)) and not (yield from source.skip(self.INLINE)):
                raise MalformedError("another message")
        yield from source.skip_space()
        yield from call_object(source, calls)


class Llama3(BlockFormat):
    """Llama 3.1 and later: an answer that is a call, or calls behind `<|python_tag|>`, separated by semicolons."""

    OPENING = Markers("<|python_tag|>", before=SPACE)
    shape = Shape(begin=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', end="}", between="; ")

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        if (yield from source.starts_after_space("{")):
            source.mark()
            yield from attempt(source, calls, self.block(source, calls, ""))
        yield from super().read(source, calls)

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from read_calls(source, calls, call_object, "", separator=";")


class CallList(BlockFormat):
    """A list of calls between two markers. Command A and 4 write text between markers, too; the ids that they give are
    numbers within an answer, so clients get others."""

    def __init__(
        self,
        opening: str,
        closing: str,
        begin: Callable[[str], str],
        call: OneCall = call_object,
        framing: tuple[str, ...] = (),
    ) -> None:
        self.OPENING, self.FRAMING = Markers(opening, *framing, before=SPACE), framing
        self.shape = Shape(begin, "}", f"{opening}[", between=", ", after=f"]{closing}", trigger=opening)
        self._closing, self._call = closing, call

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from call_list(source, calls, self._call)
        yield from source.close(self._closing)


def _apertus_call(source: Source, calls: Calls) -> Steps[None]:
    """`{"name": {...}}`: an object whose one member has the tool's name."""
    yield from source.expect("{")
    yield calls.begin((yield from _key(source)))
    yield from calls.json_arguments(source)
    yield from source.expect_after_space("}")
    yield calls.end()


COHERE_FRAMING = ("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
COHERE = CallList(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    lambda name: f'{{"tool_call_id": "0", "tool_name": {json.dumps(name)}, "parameters": ',
    framing=COHERE_FRAMING,
)
APERTUS = CallList("<|tools_prefix|>", "<|tools_suffix|>", lambda name: f"{{{json.dumps(name)}: ", call=_apertus_call)
