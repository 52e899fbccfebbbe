"""Qwen3-Coder: `<function=name>` with a `<parameter=key>` for each argument. Values are written without quotes, on
lines of their own; the line breaks around them are not part of them."""

from __future__ import annotations

from bough.parsers.calls import Calls, NamedArguments, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.source import MOST_NAME, SPACE, Markers, Source, Steps

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER = "<parameter="
OPENING = Markers(CALL, FUNCTION, before=SPACE)  # the models leave the outer tag out at times
NAME_END = Markers(">")
VALUE_END = Markers("</parameter>", before="\n", most=1)


class Qwen3Coder:
    """Each value stands on lines of its own."""

    shape = Shape(
        begin=lambda name: f"{CALL}\n{FUNCTION}{name}>\n",
        end=f"{FUNCTION_END}\n{CALL_END}",
        between="\n",
        argument=lambda name, _: f"{PARAMETER}{name}>\n",
        argument_end="\n</parameter>\n",
        trigger=CALL,
    )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._call)

    def _call(self, source: Source, calls: Calls, marker: str) -> Steps[None]:
        if marker == CALL:
            yield from source.skip_space()
            yield from source.expect(FUNCTION)
        name, _ = yield from source.until(NAME_END, MOST_NAME)
        yield calls.begin(name.strip())
        arguments = NamedArguments(calls)
        while True:
            yield from source.skip_space()
            if not (yield from source.skip(PARAMETER)):
                break
            key, _ = yield from source.until(NAME_END, MOST_NAME)
            yield from source.skip("\n")
            yield from arguments.raw(source, key.strip(), VALUE_END)
        yield from source.expect(FUNCTION_END)
        yield arguments.end()
        yield calls.end()
        source.mark()
        yield from source.skip_space()
        yield from source.skip_end(CALL_END)
