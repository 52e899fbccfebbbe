"""From a parser's events to the deltas of a chat's stream."""

from __future__ import annotations

from bough.parsers import CallArguments, CallBegin, CallEnd, CallFailed, Event, Reasoning, Text
from bough.server.openai.objects import ChatDelta, FunctionDelta, ToolCallDelta
from bough.server.parsing import CallIds


def delta_of(event: Event, ids: CallIds) -> ChatDelta | None:
    """What an event adds to a message. A call that turned out to be none is said as text, too."""
    match event:
        case Text() | CallFailed():
            return ChatDelta(content=event.text)
        case Reasoning():
            return ChatDelta(reasoning_content=event.text)
        case CallBegin():
            function = FunctionDelta(name=event.name, arguments="")
            begun = ToolCallDelta(index=event.index, id=ids.name(event), type="function", function=function)
            return ChatDelta(tool_calls=[begun])
        case CallArguments():
            more = ToolCallDelta(index=event.index, function=FunctionDelta(arguments=event.text))
            return ChatDelta(tool_calls=[more])
        case CallEnd():
            return None
