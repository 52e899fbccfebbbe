"""Mistral: `[TOOL_CALLS]` and then a JSON list of calls, or, in later models, `name[ARGS]{...}` for each call."""

from __future__ import annotations

import re

from bough.parsers.calls import Calls, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.formats.json_call import call_list
from bough.parsers.source import SPACE, MalformedError, Markers, Source, Steps

OPENING = Markers("[TOOL_CALLS]", before=SPACE)
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
NAME = re.compile(r"[\w.\-]*")


class Mistral:
    """Both ways; a forced call is written in the later one, which names the tool before any JSON."""

    shape = Shape(begin=lambda name: f"[TOOL_CALLS]{name}{ARGS}", end="", trigger="[TOOL_CALLS]")

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._block)

    def _block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from source.skip_space()
        if (yield from source.peek()) == "[":
            yield from call_list(source, calls)
        else:
            yield from self._named(source, calls)

    def _named(self, source: Source, calls: Calls) -> Steps[None]:
        name = yield from source.word(NAME)
        id = None
        if (yield from source.skip(CALL_ID)):
            id = yield from source.word(NAME)
        if not (yield from source.skip(ARGS)) and (yield from source.peek()) != "{":
            raise MalformedError("no arguments")
        yield calls.begin(name, id or None)
        yield from calls.json_arguments(source)
        yield calls.end()
