"""GigaChat 3: a message of the role `function call`, or `<|function_call|>`, and then a call's JSON."""

from __future__ import annotations

import json

from bough.parsers.calls import Calls, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.formats.json_call import call_object
from bough.parsers.source import SPACE, MalformedError, Markers, Source, Steps

SEPARATOR = "<|message_sep|>"
ROLE, INLINE = "function call<|role_sep|>", "<|function_call|>"
OPENING = Markers(SEPARATOR, ROLE, INLINE, before=SPACE)


class GigaChat:
    """A call ends with its JSON."""

    shape = Shape(begin=lambda name: f'{ROLE}\n{{"name": {json.dumps(name)}, "arguments": ', end="}", trigger=ROLE)

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._call)

    def _call(self, source: Source, calls: Calls, marker: str) -> Steps[None]:
        if marker == SEPARATOR:
            yield from source.skip_space()
            if not (yield from source.skip(ROLE)) and not (yield from source.skip(INLINE)):
                raise MalformedError("another message")
        yield from source.skip_space()
        yield from call_object(source, calls)
