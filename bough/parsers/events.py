"""What a parser makes of a model's text: a stream of events, and what they amount to in the end.

Text that began like a call and turned out to be none comes as `CallFailed`, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. `index` counts the calls of an answer; `id` is the model's own name for it, where it has one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON when they are complete."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


@dataclass(frozen=True, slots=True)
class CallFailed:
    """What began as a call is none; `text` is all of it as the model wrote it."""

    index: int
    text: str


Event = Text | Reasoning | CallBegin | CallArguments | CallEnd | CallFailed


@dataclass(slots=True)
class Call:
    name: str
    arguments: str  # the JSON of an object
    id: str | None = None


@dataclass(slots=True)
class Parsed:
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Parsed:
        """What events amount to."""
        parsed = cls()
        text: list[str] = []
        reasoning: list[str] = []
        open_calls: dict[int, tuple[CallBegin, list[str]]] = {}
        for event in events:
            match event:
                case Text():
                    text.append(event.text)
                case Reasoning():
                    reasoning.append(event.text)
                case CallBegin():
                    open_calls[event.index] = event, []
                case CallArguments():
                    open_calls[event.index][1].append(event.text)
                case CallEnd():
                    begin, pieces = open_calls.pop(event.index)
                    parsed.calls.append(Call(begin.name, "".join(pieces), begin.id))
                case CallFailed():
                    open_calls.pop(event.index)
                    text.append(event.text)
        parsed.text, parsed.reasoning = "".join(text), "".join(reasoning)
        return parsed
