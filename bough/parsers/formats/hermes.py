"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, and others with other tags."""

from __future__ import annotations

import json

from bough.parsers.calls import Calls, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.formats.json_call import call_object
from bough.parsers.source import SPACE, Markers, Source, Steps


class TaggedJson:
    """One call between two tags."""

    def __init__(self, opening: str, closing: str, *, arguments: str = "arguments", break_line: str = "\n") -> None:
        self._opening = Markers(opening, before=SPACE)
        self._closing = closing
        self.shape = Shape(
            begin=lambda name: f'{opening}{break_line}{{"name": {json.dumps(name)}, "{arguments}": ',
            end=f"}}{break_line}{closing}",
            between=break_line,
            trigger=opening,
        )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, self._opening, self._block)

    def _block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from source.skip_space()
        yield from call_object(source, calls)
        source.mark()
        yield from source.skip_space()
        yield from source.skip_end(self._closing)


HERMES = TaggedJson("<tool_call>", "</tool_call>")
