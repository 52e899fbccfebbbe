"""Apertus: `<|tools_prefix|>[{"name": {...}}]<|tools_suffix|>`, a list in which a call is an object of one member."""

from __future__ import annotations

import json

from bough.parsers.calls import Calls, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.formats.json_call import json_string
from bough.parsers.source import SPACE, Markers, Source, Steps

PREFIX, SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"
OPENING = Markers(PREFIX, before=SPACE)


class Apertus:
    """The member's name is the tool's, its value the arguments."""

    shape = Shape(
        begin=lambda name: f"{{{json.dumps(name)}: ",
        end="}",
        before=f"{PREFIX}[",
        between=", ",
        after=f"]{SUFFIX}",
        trigger=PREFIX,
    )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._list)

    def _list(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from source.skip_space()
        yield from source.expect("[")
        while True:
            yield from self._call(source, calls)
            source.mark()
            yield from source.skip_space()
            if not (yield from source.skip(",")):
                break
        yield from source.skip_end("]")
        yield from source.skip_space()
        yield from source.skip_end(SUFFIX)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.skip_space()
        yield from source.expect("{")
        yield from source.skip_space()
        name = yield from json_string(source)
        yield from source.skip_space()
        yield from source.expect(":")
        yield calls.begin(name)
        yield from calls.json_arguments(source)
        yield from source.skip_space()
        yield from source.expect("}")
        yield calls.end()
