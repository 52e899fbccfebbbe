"""Formats with a tag for each argument. Values stand between the tags without quotes."""

import re
from functools import partial

from bough.parsers.formats.base import BlockFormat, Calls, NamedArguments, Shape, read_arguments, read_calls
from bough.parsers.formats.json_calls import call_object
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps

QUOTE = Markers('"')
TAG_END = Markers(">")


class Invoke(BlockFormat):
    """`<invoke name="...">` with a `<parameter name="...">` for each argument, in the tags of several models. `prefix`
    stands before the words `invoke` and `parameter`; `before_call` and `after_call` around each invoke. A section may
    hold one call as JSON instead (`json_calls`); a parameter may say whether it is a string (`kinds`)."""

    def __init__(
        self,
        section: str,
        section_end: str,
        *,
        prefix: str = "",
        before_call: str = "",
        after_call: str = "",
        json_calls: bool = False,
        kinds: bool = False,
    ) -> None:
        self.OPENING = Markers(section, before=SPACE)
        self.section, self._section_end = section, section_end
        self._after_call, self._json_calls = after_call, json_calls
        self._invoke, self._invoke_end = f'{before_call}<{prefix}invoke name="', f"</{prefix}invoke>"
        self._parameter, value_end = f'<{prefix}parameter name="', f"</{prefix}parameter>"
        self._value_end = Markers(value_end)
        self.shape = Shape(
            begin=lambda name: f'{self._invoke}{name}">\n',
            end=f"{self._invoke_end}{after_call}\n",
            before=f"{section}\n",
            after=section_end,
            argument=lambda name, is_text: (
                f'{self._parameter}{name}"' + (f' string="{str(is_text).lower()}">' if kinds else ">")
            ),
            argument_end=f"{value_end}\n",
            trigger=section,
        )

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        if self._json_calls and (yield from source.starts_after_space("{")):
            yield from source.skip_space()
            yield from call_object(source, calls)
            yield from source.close(self._section_end)
        else:
            yield from self.read_invokes(source, calls)

    def read_invokes(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_calls(source, calls, self._call, self._section_end, opening=self._invoke)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        name, _ = yield from self._key(source)
        yield calls.begin(name)
        yield from source.skip_space()
        if (yield from source.peek()) == "{":  # some models write a JSON object instead of parameters
            yield from calls.json_arguments(source)
            yield from source.expect_after_space(self._invoke_end)
            yield calls.end()
        else:
            yield from read_arguments(source, calls, self._parameter, self._key, self._value_end, self._invoke_end)
        if self._after_call:
            yield from source.close(self._after_call)

    def _key(self, source: Source) -> Steps[tuple[str, bool | None]]:
        name, _ = yield from source.until(QUOTE, MOST_NAME)
        kind, _ = yield from source.until(TAG_END, MOST_NAME)
        return name, 'string="true"' in kind if "string=" in kind else None


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


def key_tag(source: Source, word: str = "") -> Steps[tuple[str, None]]:
    """The rest of `<arg_key>name</arg_key><arg_value>`, with `word` in each tag."""
    key, _ = yield from source.until(Markers(f"</arg_key{word}>"), MOST_NAME)
    yield from source.expect_after_space(f"<arg_value{word}>")
    return key.strip(), None


class Glm(BlockFormat):
    """GLM 4.5 and later: `<tool_call>name`, then a key and a value for each argument."""

    OPENING = Markers("<tool_call>", before=SPACE)
    NAME_END, VALUE_END = Markers("<arg_key>", "</tool_call>"), Markers("</arg_value>")
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
        if marker == "<arg_key>":
            yield from read_arguments(source, calls, marker, key_tag, self.VALUE_END, "</tool_call>", opened=True)
        else:
            yield from NamedArguments(calls).end(source)


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
            key, value_end = partial(key_tag, word=word), Markers(f"</arg_value{word}>")
            yield from read_arguments(source, calls, f"<arg_key{word}>", key, value_end, f"</tool_call{word}>")

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
            yield from source.expect_after_space("<function=")
        name, _ = yield from source.until(TAG_END, MOST_NAME)
        yield calls.begin(name.strip())
        yield from read_arguments(source, calls, "<parameter=", self._key, self.VALUE_END, "</function>")
        yield from source.close("</tool_call>")

    def _key(self, source: Source) -> Steps[tuple[str, None]]:
        key, _ = yield from source.until(TAG_END, MOST_NAME)
        yield from source.skip("\n")
        return key.strip(), None


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
                yield from source.expect_after_space("</param>")
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
        closing = "<|close|>call<|sep|>"
        yield from read_arguments(source, calls, "<|open|>argument ", self._key, self.VALUE_END, closing)

    def _key(self, source: Source) -> Steps[tuple[str, bool | None]]:
        attributes = yield from self._attributes(source)
        if "key" not in attributes:
            raise MalformedError("an argument without a key")
        return attributes["key"], attributes["type"] == "string" if "type" in attributes else None

    def _attributes(self, source: Source) -> Steps[dict[str, str]]:
        text, _ = yield from source.until(self.ATTRIBUTES_END, 2 * MOST_NAME)
        found = self.ATTRIBUTE.findall(text)
        return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}
