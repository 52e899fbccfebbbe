"""Cohere's Command A and 4: `<|START_ACTION|>` and a JSON list of calls; text stands between markers, too."""

from __future__ import annotations

import json

from bough.parsers.calls import Calls, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.formats.json_call import call_list
from bough.parsers.source import SPACE, Markers, Source, Steps

ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
FRAMING = ("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
OPENING = Markers(ACTION, *FRAMING, before=SPACE)


class Cohere:
    """The ids that the model gives are numbers within an answer, so clients get others."""

    shape = Shape(
        begin=lambda name: f'{{"tool_call_id": "0", "tool_name": {json.dumps(name)}, "parameters": ',
        end="}",
        before=f"{ACTION}[",
        between=", ",
        after=f"]{ACTION_END}",
        trigger=ACTION,
    )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._list, framing=FRAMING)

    def _list(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from source.skip_space()
        yield from call_list(source, calls)
        yield from source.skip_space()
        yield from source.skip_end(ACTION_END)
