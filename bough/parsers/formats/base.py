"""What a format of calls is, and what all of them share: the calls of an answer while they are being read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bough.parsers.events import CallArguments, CallBegin, CallEnd, CallFailed, Event, Text
from bough.parsers.json_text import json_value
from bough.parsers.source import MalformedError, Markers, Source, Steps
from bough.parsers.values import expects_text, json_of, to_json

Tools = Mapping[str, Mapping[str, Any]]  # by name, the JSON schema of its parameters


class Calls:
    """Counts calls; at most one is open. `most` is how many an answer may have: the rest of it is text."""

    def __init__(self, tools: Tools, most: int | None = None) -> None:
        self._tools = tools
        self._left = most
        self._index = -1
        self._name: str | None = None  # of the call that is open

    def begin(self, name: str, id: str | None = None) -> CallBegin:
        if name not in self._tools:
            raise MalformedError(f"there is no tool {name!r}")
        if self._left == 0:
            raise MalformedError("too many calls")
        self._index += 1
        self._name = name
        return CallBegin(self._index, name, id)

    def arguments(self, text: str) -> CallArguments:
        return CallArguments(self._index, text)

    def end(self) -> CallEnd:
        self._name = None
        if self._left is not None:
            self._left -= 1
        return CallEnd(self._index)

    def give_up(self, source: Source) -> Event:
        text, name, self._name = source.since_mark(), self._name, None
        return Text(text) if name is None else CallFailed(self._index, text)

    def schema_of(self, parameter: str) -> Any:
        assert self._name is not None
        properties = self._tools[self._name].get("properties")
        return properties.get(parameter) if isinstance(properties, Mapping) else None

    def json_arguments(self, source: Source) -> Steps[None]:
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise MalformedError("no object")
        yield from json_value(source, self.arguments)


class NamedArguments:
    """Arguments that the model writes one by one; they become the members of a JSON object."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._names: set[str] = set()

    def _open(self, name: str) -> str:
        if name in self._names:
            raise MalformedError(f"{name!r} is given twice")
        opening = ", " if self._names else "{"
        self._names.add(name)
        return f"{opening}{to_json(name)}: "

    def value(self, name: str, value: Any) -> CallArguments:
        return self._calls.arguments(self._open(name) + to_json(value))

    def raw(self, source: Source, name: str, ends: Markers, *, is_text: bool | None = None) -> Steps[None]:
        """An argument that stands in the text as it is, up to a marker. What the tool declares as a string is shown as
        it comes; anything else is JSON, or a string after all. `is_text` is the model's own word on that."""
        schema = self._calls.schema_of(name)
        if expects_text(schema) if is_text is None else is_text:
            yield self._calls.arguments(self._open(name) + '"')
            if (yield from source.passage(ends, lambda text: self._calls.arguments(to_json(text)[1:-1]))) is None:
                raise MalformedError("a value without an end")
            yield self._calls.arguments('"')
        else:
            text, _ = yield from source.until(ends)
            yield self._calls.arguments(self._open(name) + json_of(text, schema))

    def end(self, source: Source, closing: str = "") -> Steps[None]:
        """Ends the call, behind the text that closes it."""
        yield from source.expect(closing)
        yield self._calls.arguments("}" if self._names else "{}")
        yield self._calls.end()


@dataclass(frozen=True, slots=True)
class Shape:
    """Where a call's arguments stand in the text; a grammar that forces a call is made of this. They are a JSON object,
    unless `argument` tells what stands before each of them, by name, and whether it is text."""

    begin: Callable[[str], str]  # what stands before the arguments of a tool by this name
    end: str
    before: str = ""  # around all calls
    between: str = ""
    after: str = ""
    argument: Callable[[str, bool], str] | None = None
    argument_end: str = ""
    trigger: str = ""  # what a model writes only to begin calls; empty where there is no such text

    @property
    def markers(self) -> list[str]:
        inside = [] if self.argument is None else [self.argument("x", True), self.argument_end]
        return [text for text in (self.before, self.begin("x"), *inside, self.end, self.between, self.after) if text]


class ToolFormat(ABC):
    """A way to write calls."""

    shape: Shape | None = None  # None: no grammar is made for its calls

    @abstractmethod
    def read(self, source: Source, calls: Calls) -> Steps[None]:
        """A whole stream."""


class Framed(ToolFormat):
    """A format that is made of messages with headers, and so tells thinking apart by itself."""


class BlockFormat(ToolFormat):
    """Text, and blocks of calls that begin with a marker. White space around blocks belongs to them. Markers of
    `FRAMING` stand around text and are not shown."""

    OPENING: Markers
    FRAMING: Collection[str] = ()

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        while (marker := (yield from source.passage(self.OPENING, Text, mark=True))) is not None:
            if marker in self.FRAMING:
                source.since_mark()
            else:
                yield from attempt(source, calls, self.block(source, calls, marker))

    @abstractmethod
    def block(self, source: Source, calls: Calls, marker: str) -> Steps[None]:
        """The block behind a marker."""


def attempt(source: Source, calls: Calls, block: Steps[None]) -> Steps[None]:
    """Reads a block; if it is none, what stands since the mark is text."""
    try:
        yield from block
    except MalformedError:
        yield calls.give_up(source)
    else:
        source.since_mark()
        yield from source.skip_space()


OneCall = Callable[[Source, Calls], Steps[None]]
Key = Callable[[Source], Steps[tuple[str, bool | None]]]


def read_calls(
    source: Source, calls: Calls, call: OneCall, closing: str, *, opening: str = "", separator: str = ""
) -> Steps[None]:
    """Calls with an opening each, or a separator between them, and what closes them. If a later one is malformed, the
    earlier ones hold."""
    more = True
    while more:
        yield from source.expect_after_space(opening)
        yield from call(source, calls)
        source.mark()
        yield from source.skip_space()
        more = (yield from source.skip(separator)) if separator else (yield from source.starts(opening))
    yield from source.skip_end(closing)


def read_arguments(
    source: Source, calls: Calls, opening: str, key: Key, value_end: Markers, closing: str, *, opened: bool = False
) -> Steps[None]:
    """The arguments of a call that has begun, and its end. Behind each `opening`, `key` reads the name up to the value,
    and whether the model calls it text. `opened`: the first opening has been read."""
    arguments = NamedArguments(calls)
    yield from source.skip_space()
    while opened or (yield from source.skip(opening)):
        opened = False
        name, is_text = yield from key(source)
        yield from arguments.raw(source, name, value_end, is_text=is_text)
        yield from source.skip_space()
    yield from arguments.end(source, closing)
