"""Kimi K3: elements made of special tokens, `<|open|>call tool="name"<|sep|>` up to `<|close|>call<|sep|>`, with an
`argument` for each argument, which says its type. What is said to the user is the element `response`."""

from __future__ import annotations

import re

from bough.parsers.calls import Calls, NamedArguments, read_blocks
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"


def opening(element: str) -> str:
    return f"{OPEN}{element}{SEP}"


def closing(element: str) -> str:
    return f"{CLOSE}{element}{SEP}"


TOOLS = opening("tools")
FRAMING = (opening("response"), closing("response"), closing("message"))
BLOCKS = Markers(TOOLS, *FRAMING, before=SPACE)
ATTRIBUTES_END = Markers(SEP)
VALUE_END = Markers(closing("argument"))
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class KimiK3:
    """No grammar is made for its calls."""

    shape = None

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, BLOCKS, self._section, framing=FRAMING)

    def _section(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        while True:
            yield from source.skip_space()
            yield from source.expect(f"{OPEN}call ")
            yield from self._call(source, calls)
            source.mark()
            yield from source.skip_space()
            if not (yield from source.starts(f"{OPEN}call ")):
                break
        yield from source.skip_end(closing("tools"))

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        attributes = yield from _attributes(source)
        yield calls.begin(attributes.get("tool", ""))
        arguments = NamedArguments(calls)
        yield from source.skip_space()
        while (yield from source.skip(f"{OPEN}argument ")):
            attributes = yield from _attributes(source)
            if "key" not in attributes:
                raise MalformedError("an argument without a key")
            is_text = attributes["type"] == "string" if "type" in attributes else None
            yield from arguments.raw(source, attributes["key"], VALUE_END, is_text=is_text)
            yield from source.skip_space()
        yield from source.expect(closing("call"))
        yield arguments.end()
        yield calls.end()


def _attributes(source: Source) -> Steps[dict[str, str]]:
    text, _ = yield from source.until(ATTRIBUTES_END, 2 * MOST_NAME)
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in ATTRIBUTE.findall(text)}
