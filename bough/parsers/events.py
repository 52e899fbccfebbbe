"""What a parser makes of a model's text: a stream of events, and what they amount to in the end.

Text that began like a call and turned out to be none comes as `CallFailed`, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Text(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """What the model thinks before it answers."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A call begins. `index` counts the calls of an answer; `id` is the model's own name for it, where it has one."""

    index: int
    name: str
    id: str | None = None


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, which are JSON when they are complete."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    index: int


class CallFailed(msgspec.Struct, frozen=True):
    """What began as a call is none; `text` is all of it as the model wrote it."""

    index: int
    text: str


Event = Text | Reasoning | CallBegin | CallArguments | CallEnd | CallFailed


class Call(msgspec.Struct):
    name: str
    arguments: str  # the JSON of an object
    id: str | None = None


class Parsed(msgspec.Struct):
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []

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
