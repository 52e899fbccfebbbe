"""What a parser makes of a model's text: a stream of events, and what they amount to in the end.

Text that began like a call and turned out to be none comes as `CallFailed`, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
Begun = dict[int, tuple[CallBegin, list[str]]]  # by index: calls, and their arguments so far


class Call(msgspec.Struct):
    name: str
    arguments: str  # the JSON of an object
    id: str | None = None

    @staticmethod
    def join(events: Iterable[Event], begun: Begun | None = None) -> Iterator[Text | Reasoning | Call]:
        """The events with each call in one piece; what failed to become one is text. `begun` holds the calls that later
        events complete."""
        begun = {} if begun is None else begun
        for event in events:
            match event:
                case CallBegin():
                    begun[event.index] = event, []
                case CallArguments():
                    begun[event.index][1].append(event.text)
                case CallEnd():
                    begin, pieces = begun.pop(event.index)
                    yield Call(begin.name, "".join(pieces), begin.id)
                case CallFailed():
                    begun.pop(event.index)
                    yield Text(event.text)
                case _:
                    yield event


class Parsed(msgspec.Struct):
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []

    @classmethod
    def of(cls, events: Iterable[Event]) -> Parsed:
        """What events amount to."""
        found = list(Call.join(events))
        text = "".join(each.text for each in found if isinstance(each, Text))
        reasoning = "".join(each.text for each in found if isinstance(each, Reasoning))
        return cls(text, reasoning, [each for each in found if isinstance(each, Call)])
