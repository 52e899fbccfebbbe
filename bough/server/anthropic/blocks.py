"""The blocks of a message: thinking, text and calls in the order in which the model wrote them, whole or as events."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bough.parsers import CallArguments, CallBegin, CallEnd, CallFailed, Event, Reasoning, Text
from bough.server.anthropic.objects import (
    Block,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Delta,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from bough.server.parsing import CallIds
from bough.server.streaming import named_event

PREFIX = "toolu_"


def whole_blocks(events: Iterable[Event]) -> list[Block]:
    """A finished answer's blocks. There is at least one, be it an empty text."""
    blocks: list[Block] = []
    ids = CallIds(PREFIX)
    arguments: list[str] = []
    begun: CallBegin | None = None
    for event in events:
        match event:
            case Text() | CallFailed() if event.text:
                if blocks and isinstance(blocks[-1], TextBlock):
                    blocks[-1] = TextBlock(text=blocks[-1].text + event.text)
                else:
                    blocks.append(TextBlock(text=event.text))
            case Reasoning():
                if blocks and isinstance(blocks[-1], ThinkingBlock):
                    blocks[-1] = ThinkingBlock(thinking=blocks[-1].thinking + event.text)
                else:
                    blocks.append(ThinkingBlock(thinking=event.text))
            case CallBegin():
                begun, arguments = event, []
            case CallArguments():
                arguments.append(event.text)
            case CallEnd():
                assert begun is not None
                given = msgspec.json.decode("".join(arguments))
                blocks.append(ToolUseBlock(id=ids.name(begun), name=begun.name, input=given))
    return blocks or [TextBlock(text="")]


class BlockWriter:
    """Writes the events of blocks; one block is open at a time."""

    def __init__(self) -> None:
        self._ids = CallIds(PREFIX)
        self._index = -1
        self._open: type[Block] | None = None

    def write(self, event: Event) -> bytes:
        match event:
            case Text() | CallFailed():
                return self._say(TextBlock(text=""), TextDelta(text=event.text)) if event.text else b""
            case Reasoning():
                return self._say(ThinkingBlock(thinking=""), ThinkingDelta(thinking=event.text))
            case CallBegin():
                return self._begin(ToolUseBlock(id=self._ids.name(event), name=event.name, input={}))
            case CallArguments():
                return self._delta(InputJsonDelta(partial_json=event.text))
            case CallEnd():
                return self._end()

    def close(self) -> bytes:
        """After the last event."""
        return self._end() if self._index >= 0 else self._begin(TextBlock(text="")) + self._end()

    def _say(self, block: Block, delta: Delta) -> bytes:
        """More of a block of this kind, which begins if another one is open."""
        opening = b"" if self._open is type(block) else self._begin(block)
        return opening + self._delta(delta)

    def _begin(self, block: Block) -> bytes:
        closing = self._end()
        self._index += 1
        self._open = type(block)
        return closing + named_event(ContentBlockStart(index=self._index, content_block=block))

    def _delta(self, delta: Delta) -> bytes:
        return named_event(ContentBlockDelta(index=self._index, delta=delta))

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta(SignatureDelta(signature="")) if self._open is ThinkingBlock else b""
        self._open = None
        return signed + named_event(ContentBlockStop(index=self._index))
