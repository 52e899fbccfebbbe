"""Formats with a tag for each argument. Values stand between the tags without quotes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bough.parsers.calls import Calls, NamedArguments, read_blocks, read_calls
from bough.parsers.formats.base import BlockFormat, Shape
from bough.parsers.formats.json_calls import call_object
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps

QUOTE = Markers('"')
TAG_END = Markers(">")


@dataclass(frozen=True, slots=True)
class Invoke:
    """`<invoke name="...">` with a `<parameter name="...">` for each argument, in the tags of several models. `prefix`
    stands before the words `invoke` and `parameter`; `before_call` and `after_call` around each invoke."""

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
            yield from source.close(self.section_end)
        else:
            yield from self.read_invokes(source, calls)

    def read_invokes(self, source: Source, calls: Calls) -> Steps[None]:
        opening = f'{self.before_call}<{self.prefix}invoke name="'
        yield from read_calls(source, calls, self._call, self.section_end, opening=opening)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        name, _ = yield from source.until(QUOTE, MOST_NAME)
        yield from source.until(TAG_END, MOST_NAME)
        yield calls.begin(name)
        closing, value_end = f"</{self.prefix}invoke>", Markers(f"</{self.prefix}parameter>")
        yield from source.skip_space()
        if (yield from source.peek()) == "{":  # some models write a JSON object instead of parameters
            yield from calls.json_arguments(source)
            yield from source.skip_space()
            yield from source.expect(closing)
            yield calls.end()
        else:
            arguments = NamedArguments(calls)
            while (yield from source.skip(f'<{self.prefix}parameter name="')):
                name, _ = yield from source.until(QUOTE, MOST_NAME)
                kind, _ = yield from source.until(TAG_END, MOST_NAME)
                is_text = 'string="true"' in kind if "string=" in kind else None
                yield from arguments.raw(source, name, value_end, is_text=is_text)
                yield from source.skip_space()
            yield from arguments.end(source, closing)
        if self.after_call:
            yield from source.close(self.after_call)


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


def keys_and_values(source: Source, arguments: NamedArguments, word: str = "", *, opened: bool = False) -> Steps[None]:
    """`<arg_key>name</arg_key><arg_value>value</arg_value>` for each argument, with `word` in each tag. `opened`: the
    first tag has been read."""
    key_end, value_end = Markers(f"</arg_key{word}>"), Markers(f"</arg_value{word}>")
    yield from source.skip_space()
    while opened or (yield from source.skip(f"<arg_key{word}>")):
        opened = False
        key, _ = yield from source.until(key_end, MOST_NAME)
        yield from source.skip_space()
        yield from source.expect(f"<arg_value{word}>")
        yield from arguments.raw(source, key.strip(), value_end)
        yield from source.skip_space()


class Glm(BlockFormat):
    """GLM 4.5 and later: `<tool_call>name`, then a key and a value for each argument."""

    OPENING = Markers("<tool_call>", before=SPACE)
    NAME_END = Markers("<arg_key>", "</tool_call>")
    shape = Shape(
        begin=lambda name: f"<tool_call>{name}\n",
        end="</tool_call>",
        between="\n",
        argument=lambda name, _: f"<arg_key>{name}</arg_key>\n<arg_value>",
        argument_end="</arg_value>\n",
        trigger="<tool_call>",
    )

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        name, marker = yield from source.until(self.NAME_END, MOST_NAME)
        yield calls.begin(name.strip())
        arguments = NamedArguments(calls)
        if marker == "<arg_key>":
            yield from keys_and_values(source, arguments, opened=True)
        yield from arguments.end(source, "</tool_call>" if marker == "<arg_key>" else "")


class Hunyuan(BlockFormat):
    """A section of calls, `<tool_call>name<tool_sep>`, then a key and a value for each argument. Later tokenizers
    have a word in all of these tags (`<tool_calls:opensource>`): the first tag tells which. It has no grammar."""

    OPENING = Markers("<tool_calls", before=SPACE)
    WORD = re.compile(r"(:\w+)?")

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        word, _ = yield from source.until(TAG_END, MOST_NAME)
        if not self.WORD.fullmatch(word):
            raise MalformedError("another tag")

        def call(source: Source, calls: Calls) -> Steps[None]:
            name, _ = yield from source.until(Markers(f"<tool_sep{word}>"), MOST_NAME)
            yield calls.begin(name.strip())
            arguments = NamedArguments(calls)
            yield from keys_and_values(source, arguments, word)
            yield from arguments.end(source, f"</tool_call{word}>")

        yield from read_calls(source, calls, call, f"</tool_calls{word}>", opening=f"<tool_call{word}>")


class Qwen3Coder(BlockFormat):
    """`<function=name>` with a `<parameter=key>` for each argument, whose value stands on lines of its own."""

    OPENING = Markers("<tool_call>", "<function=", before=SPACE)  # the models leave the outer tag out at times
    VALUE_END = Markers("</parameter>", before="\n", most=1)
    shape = Shape(
        begin=lambda name: f"<tool_call>\n<function={name}>\n",
        end="</function>\n</tool_call>",
        between="\n",
        argument=lambda name, _: f"<parameter={name}>\n",
        argument_end="\n</parameter>\n",
        trigger="<tool_call>",
    )

    def block(self, source: Source, calls: Calls, marker: str) -> Steps[None]:
        if marker == "<tool_call>":
            yield from source.skip_space()
            yield from source.expect("<function=")
        name, _ = yield from source.until(TAG_END, MOST_NAME)
        yield calls.begin(name.strip())
        arguments = NamedArguments(calls)
        yield from source.skip_space()
        while (yield from source.skip("<parameter=")):
            key, _ = yield from source.until(TAG_END, MOST_NAME)
            yield from source.skip("\n")
            yield from arguments.raw(source, key.strip(), self.VALUE_END)
            yield from source.skip_space()
        yield from arguments.end(source, "</function>")
        yield from source.close("</tool_call>")


class MiniCpm(BlockFormat):
    """MiniCPM 5: `<function name="...">` with a `<param name="...">` for each argument, or, where a value could be
    taken for tags, CDATA in it. No grammar is made for its calls."""

    OPENING = Markers("<function name=", before=SPACE)
    VALUE_END, CDATA_END = Markers("</param>"), Markers("]]>")
    QUOTED = re.compile(r"""\s*(["'])(?P<name>.*)\1\s*""")

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield calls.begin((yield from self._name(source)))
        arguments = NamedArguments(calls)
        yield from source.skip_space()
        while (yield from source.skip("<param name=")):
            name = yield from self._name(source)
            if (yield from source.skip("<![CDATA[")):
                yield from arguments.raw(source, name, self.CDATA_END)
                yield from source.skip_space()
                yield from source.expect("</param>")
            else:
                yield from arguments.raw(source, name, self.VALUE_END)
            yield from source.skip_space()
        yield from arguments.end(source, "</function>")

    def _name(self, source: Source) -> Steps[str]:
        """The name in quotes behind `name=`, up to the end of its tag."""
        text, _ = yield from source.until(TAG_END, MOST_NAME)
        found = self.QUOTED.fullmatch(text)
        if found is None:
            raise MalformedError("no name")
        return found["name"]


class KimiK3(BlockFormat):
    """Elements made of special tokens, `<|open|>call tool="name"<|sep|>` up to `<|close|>call<|sep|>`, with an
    `argument` for each argument, which says its type. What is said to the user is the element `response`. No grammar is
    made for its calls."""

    TOOLS, RESPONSE = "<|open|>tools<|sep|>", "<|open|>response<|sep|>"
    FRAMING = (RESPONSE, "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    OPENING = Markers(TOOLS, *FRAMING, before=SPACE)
    ATTRIBUTES_END, VALUE_END = Markers("<|sep|>"), Markers("<|close|>argument<|sep|>")
    ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from read_calls(source, calls, self._call, "<|close|>tools<|sep|>", opening="<|open|>call ")

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        attributes = yield from self._attributes(source)
        yield calls.begin(attributes.get("tool", ""))
        arguments = NamedArguments(calls)
        yield from source.skip_space()
        while (yield from source.skip("<|open|>argument ")):
            attributes = yield from self._attributes(source)
            if "key" not in attributes:
                raise MalformedError("an argument without a key")
            is_text = attributes["type"] == "string" if "type" in attributes else None
            yield from arguments.raw(source, attributes["key"], self.VALUE_END, is_text=is_text)
            yield from source.skip_space()
        yield from arguments.end(source, "<|close|>call<|sep|>")

    def _attributes(self, source: Source) -> Steps[dict[str, str]]:
        text, _ = yield from source.until(self.ATTRIBUTES_END, 2 * MOST_NAME)
        found = self.ATTRIBUTE.findall(text)
        return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}
