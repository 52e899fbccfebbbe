"""Calls that wait until they are complete.

What begins like a call may turn out to be text, and what a stream has shown it cannot take back. So a call is shown
when it is one, and whoever collects a stream has the calls of the whole answer. Only tools whose calls cannot go wrong,
or whose client wants them as they come, are shown earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from bough.parsers.events import CallArguments, CallBegin, CallEnd, CallFailed, Event, Text


class Holder:
    """Owns the call that is open, unless its tool is one of the `eager`, and the numbers of those that are shown."""

    def __init__(self, eager: Collection[str]) -> None:
        self._eager = eager
        self._held: CallBegin | None = None
        self._arguments: list[str] = []
        self._index = -1

    def pass_on(self, events: Iterable[Event]) -> list[Event]:
        """The events that may be shown."""
        return [shown for event in events for shown in self._pass(event)]

    def _pass(self, event: Event) -> list[Event]:
        match event:
            case CallBegin() if event.name in self._eager:
                return [self._begin(event)]
            case CallBegin():
                self._held, self._arguments = event, []
                return []
            case CallArguments() if self._held is not None:
                self._arguments.append(event.text)
                return []
            case CallArguments():
                return [CallArguments(self._index, event.text)]
            case CallEnd():
                return [*self._release(), CallEnd(self._index)]
            case CallFailed() if self._held is not None:
                self._held = None
                return [Text(event.text)]
            case CallFailed():
                return [CallFailed(self._index, event.text)]
        return [event]

    def _release(self) -> list[Event]:
        """The call that was held, complete, its arguments in one piece."""
        if self._held is None:
            return []
        begin, self._held = self._begin(self._held), None
        return [begin, CallArguments(self._index, "".join(self._arguments))]

    def _begin(self, event: CallBegin) -> CallBegin:
        self._index += 1
        return CallBegin(self._index, event.name, event.id)
