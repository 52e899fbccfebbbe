"""GLM 4.5 and later: `<tool_call>name`, then a key and a value for each argument. Values are written without quotes."""

from __future__ import annotations

from bough.parsers.calls import Calls, NamedArguments, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.source import MOST_NAME, SPACE, Markers, Source, Steps

OPENING = Markers("<tool_call>", before=SPACE)
CLOSING = "</tool_call>"
KEY = "<arg_key>"
AFTER_NAME = Markers(KEY, CLOSING)
KEY_END = Markers("</arg_key>")
VALUE, VALUE_END = "<arg_value>", Markers("</arg_value>")


class Glm:
    """A call ends with its marker."""

    shape = Shape(
        begin=lambda name: f"<tool_call>{name}\n",
        end=CLOSING,
        between="\n",
        argument=lambda name, _: f"{KEY}{name}</arg_key>\n{VALUE}",
        argument_end="</arg_value>\n",
        trigger="<tool_call>",
    )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._call)

    def _call(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        name, marker = yield from source.until(AFTER_NAME, MOST_NAME)
        yield calls.begin(name.strip())
        arguments = NamedArguments(calls)
        while marker == KEY:
            key, _ = yield from source.until(KEY_END, MOST_NAME)
            yield from source.skip_space()
            yield from source.expect(VALUE)
            yield from arguments.raw(source, key.strip(), VALUE_END)
            yield from source.skip_space()
            marker = KEY if (yield from source.skip(KEY)) else ""
        if marker != CLOSING:
            yield from source.expect(CLOSING)
        yield arguments.end()
        yield calls.end()
