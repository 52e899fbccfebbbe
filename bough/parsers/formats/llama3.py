"""Llama 3.1 and later: an answer that is a call's JSON, or calls behind `<|python_tag|>`, separated by semicolons."""

from __future__ import annotations

import json

from bough.parsers.calls import Calls, attempt, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.formats.json_call import call_object
from bough.parsers.source import SPACE, Markers, Source, Steps

OPENING = Markers("<|python_tag|>", before=SPACE)


class Llama3:
    """Calls without an end marker."""

    shape = Shape(begin=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', end="}", between="; ")

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        if (yield from source.starts_after_space("{")):
            source.mark()
            yield from attempt(source, calls, self._calls(source, calls, ""))
        yield from read_blocks(source, calls, OPENING, self._calls)

    def _calls(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        while True:
            yield from source.skip_space()
            yield from call_object(source, calls)
            source.mark()
            yield from source.skip_space()
            if not (yield from source.skip(";")):
                return
