"""`<invoke name="...">` with a `<parameter name="...">` for each argument, in the tags of MiniMax M2, DeepSeek V3.2 and
V4, Step 3 and dots. Values are written without quotes."""

from __future__ import annotations

from dataclasses import dataclass

from bough.parsers.calls import Calls, NamedArguments, read_blocks
from bough.parsers.formats.base import Shape
from bough.parsers.formats.json_call import call_object
from bough.parsers.source import MOST_NAME, SPACE, Markers, Source, Steps

QUOTE = Markers('"')
TAG_END = Markers(">")


@dataclass(frozen=True, slots=True)
class Invoke:
    """`prefix` stands before the words `invoke` and `parameter`; `before_call` and `after_call` around each invoke."""

    section: str
    section_end: str
    prefix: str = ""
    before_call: str = ""
    after_call: str = ""
    json_calls: bool = False  # a section may hold one call as JSON instead
    kinds: bool = False  # a parameter says whether it is a string

    @property
    def shape(self) -> Shape:
        return Shape(
            begin=lambda name: f'{self.before_call}<{self.prefix}invoke name="{name}">\n',
            end=f"</{self.prefix}invoke>{self.after_call}\n",
            before=f"{self.section}\n",
            after=self.section_end,
            argument=self._parameter,
            argument_end=f"</{self.prefix}parameter>\n",
            trigger=self.section,
        )

    def _parameter(self, name: str, is_text: bool) -> str:
        kind = f' string="{str(is_text).lower()}"' if self.kinds else ""
        return f'<{self.prefix}parameter name="{name}"{kind}>'

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, Markers(self.section, before=SPACE), self._section)

    def _section(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        if self.json_calls and (yield from source.starts_after_space("{")):
            yield from source.skip_space()
            yield from call_object(source, calls)
            source.mark()
            yield from source.skip_space()
            yield from source.skip_end(self.section_end)
        else:
            yield from self.read_section(source, calls)

    def read_section(self, source: Source, calls: Calls) -> Steps[None]:
        """The calls of a section, and its end."""
        opening = f'{self.before_call}<{self.prefix}invoke name="'
        while True:
            yield from source.skip_space()
            yield from source.expect(opening)
            name, _ = yield from source.until(QUOTE, MOST_NAME)
            yield from source.until(TAG_END, MOST_NAME)
            yield calls.begin(name)
            yield from self._arguments(source, calls)
            yield calls.end()
            source.mark()
            yield from source.skip_space()
            if self.after_call:
                yield from source.skip_end(self.after_call)
                yield from source.skip_space()
            if not (yield from source.starts(opening)):
                break
        yield from source.skip_end(self.section_end)

    def _arguments(self, source: Source, calls: Calls) -> Steps[None]:
        """Up to the end of the invoke. Some models write a JSON object there instead of parameters."""
        closing = f"</{self.prefix}invoke>"
        value_end = Markers(f"</{self.prefix}parameter>")
        yield from source.skip_space()
        if (yield from source.peek()) == "{":
            yield from calls.json_arguments(source)
            yield from source.skip_space()
            yield from source.expect(closing)
            return
        arguments = NamedArguments(calls)
        while (yield from source.skip(f'<{self.prefix}parameter name="')):
            name, _ = yield from source.until(QUOTE, MOST_NAME)
            kind, _ = yield from source.until(TAG_END, MOST_NAME)
            is_text = 'string="true"' in kind if "string=" in kind else None
            yield from arguments.raw(source, name, value_end, is_text=is_text)
            yield from source.skip_space()
        yield from source.expect(closing)
        yield arguments.end()


DOTS = Invoke("<dots_function_call>", "</dots_function_call>", json_calls=True)
MINIMAX_M2 = Invoke("<minimax:tool_call>", "</minimax:tool_call>")
DEEPSEEK_V32 = Invoke("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", prefix="｜DSML｜", kinds=True)
DEEPSEEK_V4 = Invoke("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", prefix="｜DSML｜", kinds=True)
STEP3 = Invoke(
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    prefix="steptml:",
    before_call="<｜tool_call_begin｜>function<｜tool_sep｜>",
    after_call="<｜tool_call_end｜>",
)
