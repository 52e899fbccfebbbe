"""The calls of one answer while they are being read: which tools there are, and which call is open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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


Block = Callable[[Source, Calls, str], Steps[None]]
OneCall = Callable[[Source, Calls], Steps[None]]


def read_blocks(
    source: Source, calls: Calls, opening: Markers, block: Block, *, framing: Collection[str] = ()
) -> Steps[None]:
    """A whole stream: text, and blocks of calls that begin with a marker. White space around blocks belongs to them.
    Markers that are `framing` stand around text and are not shown."""
    while (marker := (yield from source.passage(opening, Text, mark=True))) is not None:
        if marker in framing:
            source.since_mark()
            continue
        yield from attempt(source, calls, block(source, calls, marker))


def read_calls(
    source: Source, calls: Calls, call: OneCall, closing: str, *, opening: str = "", separator: str = ""
) -> Steps[None]:
    """Calls with an opening each, or a separator between them, and what closes them. If a later one is malformed, the
    earlier ones hold."""
    more = True
    while more:
        yield from source.skip_space()
        yield from source.expect(opening)
        yield from call(source, calls)
        source.mark()
        yield from source.skip_space()
        more = (yield from source.skip(separator)) if separator else (yield from source.starts(opening))
    yield from source.skip_end(closing)


def attempt(source: Source, calls: Calls, block: Steps[None]) -> Steps[None]:
    """Reads a block; if it is none, what stands since the mark is text."""
    try:
        yield from block
    except MalformedError:
        yield calls.give_up(source)
    else:
        source.since_mark()
        yield from source.skip_space()
