"""Formats that name the tool outside of JSON and write its arguments as a JSON object."""

import re

from bough.parsers.formats.base import BlockFormat, Calls, Shape, read_calls
from bough.parsers.formats.json_calls import call_list
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps


class Mistral(BlockFormat):
    """`[TOOL_CALLS]` and then a JSON list of calls, or, in later models, `name[ARGS]{...}` for each call. A forced call
    is written in the later way, which names the tool before any JSON."""

    OPENING = Markers("[TOOL_CALLS]", before=SPACE)
    NAME = re.compile(r"[\w.\-]*")
    shape = Shape(begin=lambda name: f"[TOOL_CALLS]{name}[ARGS]", end="", trigger="[TOOL_CALLS]")

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from source.skip_space()
        if (yield from source.peek()) == "[":
            yield from call_list(source, calls)
            return
        name, id = (yield from source.word(self.NAME)), None
        if (yield from source.skip("[CALL_ID]")):
            id = yield from source.word(self.NAME)
        if not (yield from source.skip("[ARGS]")) and (yield from source.peek()) != "{":
            raise MalformedError("no arguments")
        yield calls.begin(name, id or None)
        yield from calls.json_arguments(source)
        yield calls.end()


class DeepSeek(BlockFormat):
    """DeepSeek V3, R1 and V3.1: a section of calls, each with its name, a separator and its arguments. `fenced` is how
    V3 writes it: `function`, the separator, the name, and the arguments in a code block."""

    SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    SEPARATOR, FENCE, FENCE_END = "<｜tool▁sep｜>", "```json", "```"
    OPENING = Markers(SECTION, before=SPACE)

    def __init__(self, *, fenced: bool) -> None:
        self._name_end = Markers("\n" if fenced else self.SEPARATOR)
        self._fenced = fenced
        self.shape = Shape(
            begin=lambda name: (
                f"{self.CALL}function{self.SEPARATOR}{name}\n{self.FENCE}\n"
                if fenced
                else f"{self.CALL}{name}{self.SEPARATOR}"
            ),
            end=f"\n{self.FENCE_END}{self.CALL_END}" if fenced else self.CALL_END,
            before=self.SECTION,
            between="\n" if fenced else "",
            after=self.SECTION_END,
            trigger=self.SECTION,
        )

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from read_calls(source, calls, self._call, self.SECTION_END, opening=self.CALL)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        if self._fenced:
            yield from source.expect("function" + self.SEPARATOR)
        name, _ = yield from source.until(self._name_end, MOST_NAME)
        yield calls.begin(name.strip())
        if self._fenced:
            yield from source.expect_after_space(self.FENCE)
        yield from calls.json_arguments(source)
        yield calls.end()
        if self._fenced:
            yield from source.close(self.FENCE_END)
        yield from source.close(self.CALL_END)


class KimiK2(BlockFormat):
    """A section of calls. A call is named by its id, `functions.name:0`, which clients must send back with the result,
    so it is kept."""

    SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
    OPENING, ID_END = Markers(SECTION, before=SPACE), Markers("<|tool_call_argument_begin|>")
    shape = Shape(
        begin=lambda name: f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        end=CALL_END,
        before=SECTION,
        after=SECTION_END,
        trigger=SECTION,
    )

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from read_calls(source, calls, self._call, self.SECTION_END, opening=self.CALL)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        id = (yield from source.until(self.ID_END, MOST_NAME))[0].strip()
        name, colon, number = id.rpartition(":")
        yield calls.begin((name if colon and number.isdecimal() else id).removeprefix("functions."), id)
        yield from calls.json_arguments(source)
        yield calls.end()
        yield from source.close(self.CALL_END)
