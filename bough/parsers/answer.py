"""One answer's text, read as reasoning, text and calls: the two parsers of a request, one behind the other."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bough.parsers.events import Begun, Call, CallArguments, CallBegin, CallEnd, Event, Parsed, Reasoning, Text
from bough.parsers.formats.base import Calls, Framed, ToolFormat
from bough.parsers.reasoning import ReasoningFormat
from bough.parsers.source import StreamParser


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What to look for in an answer. Without a reasoning format thinking stays where it is, without a tool format
    calls do."""

    reasoning: ReasoningFormat | None = None
    thinking: bool = False  # the answer begins inside of the thinking
    stream_reasoning: bool = True  # else it is shown at once when it has ended
    tool_format: ToolFormat | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most_calls: int | None = None
    eager: Collection[str] = ()  # tools whose calls are shown while they are written; others when they are complete
    openings: tuple[str, ...] = ()  # what an answer begins with that is nothing but calls, and so does not think

    @property
    def plain(self) -> bool:
        return self.reasoning is None and self.tool_format is None

    def parse(self, text: str) -> Parsed:
        parser = AnswerParser(self)
        return Parsed.of([*parser.feed(text), *parser.finish()])


class AnswerParser:
    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._splitter: StreamParser | None = None
        self._caller: StreamParser | None = None
        self._waiting: list[str] = []  # reasoning that is to be shown at once
        self._buffer = CallBuffer(form.eager)
        calls, tool_format, reasoning = Calls(form.tools, form.most_calls), form.tool_format, form.reasoning
        framed = None if reasoning is None else reasoning.framed
        if isinstance(tool_format, Framed):
            framed = tool_format
        if framed is not None:
            self._caller = StreamParser(lambda source: framed.read(source, calls))
            return
        if reasoning is not None:
            self._splitter = StreamParser(lambda source: reasoning.read(source, form.thinking, form.openings))
        if tool_format is not None:
            self._caller = StreamParser(lambda source: tool_format.read(source, calls))

    def feed(self, text: str) -> list[Event]:
        split = [Text(text)] if self._splitter is None else self._splitter.feed(text)
        return self._shown(self._buffer.pass_on(self._called(split)))

    def finish(self) -> list[Event]:
        events = self._called([] if self._splitter is None else self._splitter.finish())
        if self._caller is not None:
            events += self._caller.finish()
        return [*self._shown(self._buffer.pass_on(events)), *self._thought()]

    def _called(self, events: Iterable[Event]) -> list[Event]:
        if self._caller is None:
            return list(events)
        read: list[Event] = []
        for event in events:
            read += self._caller.feed(event.text) if isinstance(event, Text) else [event]
        return read

    def _shown(self, events: Iterable[Event]) -> list[Event]:
        if self._form.reasoning is None:  # a format that cannot but tell reasoning apart, unasked
            return [Text(event.text) if isinstance(event, Reasoning) else event for event in events]
        if self._form.stream_reasoning:
            return list(events)
        shown: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                self._waiting.append(event.text)
            else:
                shown += [*self._thought(), event]
        return shown

    def _thought(self) -> list[Event]:
        thought, self._waiting = "".join(self._waiting), []
        return [Reasoning(thought)] if thought else []


class CallBuffer:
    """Holds a call back until it is complete, because it may turn out to be text, and a stream takes nothing back.
    Calls of `eager` tools are passed on at once. Numbers the calls that are shown."""

    def __init__(self, eager: Collection[str]) -> None:
        self._eager = eager
        self._held: Begun = {}
        self._index = -1

    def pass_on(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Text | Reasoning):
                yield event
            elif isinstance(event, CallBegin) and event.name in self._eager:
                yield self._begin(event)
            elif isinstance(event, CallBegin) or event.index in self._held:
                for found in Call.join([event], self._held):
                    if isinstance(found, Call):
                        yield self._begin(found)
                        yield CallArguments(self._index, found.arguments)
                        yield CallEnd(self._index)
                    else:
                        yield found
            else:
                yield msgspec.structs.replace(event, index=self._index)

    def _begin(self, call: CallBegin | Call) -> CallBegin:
        self._index += 1
        return CallBegin(self._index, call.name, call.id)
