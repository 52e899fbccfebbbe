"""One answer's text, read as reasoning, text and calls: the two parsers of a request, one behind the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bough.parsers.calls import Calls
from bough.parsers.events import Event, Parsed, Reasoning, Text, collect
from bough.parsers.formats.base import Framed, ToolFormat
from bough.parsers.holding import Holder
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
        """Whether an answer is nothing but text, whatever it is."""
        return self.reasoning is None and self.tool_format is None

    def parse(self, text: str) -> Parsed:
        """A whole answer."""
        parser = AnswerParser(self)
        return collect([*parser.feed(text), *parser.finish()])


class AnswerParser:
    """Reads one answer as it comes."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._splitter: StreamParser | None = None
        self._caller: StreamParser | None = None
        self._waiting: list[str] = []  # reasoning that is to be shown at once
        self._holder = Holder(form.eager)
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
        """The events that more text brings."""
        split = [Text(text)] if self._splitter is None else self._splitter.feed(text)
        return self._shown(self._holder.pass_on(self._called(split)))

    def finish(self) -> list[Event]:
        """The events that the end of the answer brings."""
        events = self._called([] if self._splitter is None else self._splitter.finish())
        if self._caller is not None:
            events += self._caller.finish()
        shown = self._shown(self._holder.pass_on(events))
        return [*shown, *self._thought()]

    def _called(self, events: Iterable[Event]) -> list[Event]:
        """What the second parser makes of the first one's text."""
        if self._caller is None:
            return list(events)
        read: list[Event] = []
        for event in events:
            read += self._caller.feed(event.text) if isinstance(event, Text) else [event]
        return read

    def _shown(self, events: list[Event]) -> list[Event]:
        if self._form.reasoning is None:  # a format that cannot but tell reasoning apart, unasked
            return [Text(event.text) if isinstance(event, Reasoning) else event for event in events]
        if self._form.stream_reasoning:
            return events
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
