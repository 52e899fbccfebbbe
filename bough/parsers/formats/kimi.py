"""Kimi K2: a section of calls. A call is named by its id, `functions.name:0`, which clients must send back with the
result, so it is kept."""

from __future__ import annotations

from bough.parsers.calls import Calls, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.source import MOST_NAME, SPACE, Markers, Source, Steps

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiK2:
    """Arguments are JSON."""

    shape = Shape(
        begin=lambda name: f"{CALL}functions.{name}:0{ARGUMENTS}",
        end=CALL_END,
        before=SECTION,
        after=SECTION_END,
        trigger=SECTION,
    )

    def __init__(self) -> None:
        self._opening = Markers(SECTION, before=SPACE)
        self._id_end = Markers(ARGUMENTS)

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, self._opening, self._section)

    def _section(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        while True:
            yield from source.skip_space()
            yield from source.expect(CALL)
            id, _ = yield from source.until(self._id_end, MOST_NAME)
            yield calls.begin(_name_in(id.strip()), id.strip())
            yield from calls.json_arguments(source)
            yield calls.end()
            source.mark()
            yield from source.skip_space()
            yield from source.skip_end(CALL_END)
            yield from source.skip_space()
            if not (yield from source.starts(CALL)):
                break
        yield from source.skip_end(SECTION_END)


def _name_in(id: str) -> str:
    name, colon, number = id.rpartition(":")
    return (name if colon and number.isdecimal() else id).removeprefix("functions.")
