"""DeepSeek V3, R1 and V3.1: a section of calls, each with its name, a separator and its arguments as JSON."""

from __future__ import annotations

from bough.parsers.calls import Calls, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.source import MOST_NAME, SPACE, Markers, Source, Steps

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, FENCE_END = "```json", "```"


class DeepSeek:
    """`fenced` is how V3 writes it: `function`, the separator, the name, and the JSON in a code block."""

    def __init__(self, *, fenced: bool) -> None:
        self._opening = Markers(SECTION, before=SPACE)
        self._name_end = Markers("\n" if fenced else SEPARATOR)
        self._fenced = fenced
        if fenced:
            self.shape = Shape(
                begin=lambda name: f"{CALL}function{SEPARATOR}{name}\n{FENCE}\n",
                end=f"\n{FENCE_END}{CALL_END}",
                before=SECTION,
                between="\n",
                after=SECTION_END,
                trigger=SECTION,
            )
        else:
            self.shape = Shape(
                begin=lambda name: f"{CALL}{name}{SEPARATOR}",
                end=CALL_END,
                before=SECTION,
                after=SECTION_END,
                trigger=SECTION,
            )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, self._opening, self._section)

    def _section(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        while True:
            yield from source.skip_space()
            yield from source.expect(CALL)
            yield from self._call(source, calls)
            source.mark()
            yield from source.skip_space()
            if not (yield from source.starts(CALL)):
                break
        yield from source.skip_end(SECTION_END)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        if self._fenced:
            yield from source.expect("function" + SEPARATOR)
        name, _ = yield from source.until(self._name_end, MOST_NAME)
        yield calls.begin(name.strip())
        yield from source.skip_space()
        if self._fenced:
            yield from source.expect(FENCE)
        yield from calls.json_arguments(source)
        yield calls.end()
        yield from source.skip_space()
        if self._fenced and (yield from source.skip_end(FENCE_END)):
            yield from source.skip_space()
        yield from source.skip_end(CALL_END)
