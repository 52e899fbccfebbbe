"""Hunyuan: a section of calls, `<tool_call>name<tool_sep>`, then a key and a value for each argument.

Its later tokenizers have a word in all of these tags (`<tool_calls:opensource>`); whichever the first one has, the
others have too. Values are written without quotes.
"""

from __future__ import annotations

import re

from bough.parsers.calls import Calls, NamedArguments, read_blocks
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps

OPENING = Markers("<tool_calls", before=SPACE)
TAG_END = Markers(">")
WORD = re.compile(r"(:\w+)?")


class Hunyuan:
    """No grammar is made for its calls."""

    shape = None

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._section)

    def _section(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        word, _ = yield from source.until(TAG_END, MOST_NAME)
        if not WORD.fullmatch(word):
            raise MalformedError("another tag")
        opening = f"<tool_call{word}>"
        while True:
            yield from source.skip_space()
            yield from source.expect(opening)
            yield from self._call(source, calls, word)
            source.mark()
            yield from source.skip_space()
            if not (yield from source.starts(opening)):
                break
        yield from source.skip_end(f"</tool_calls{word}>")

    def _call(self, source: Source, calls: Calls, word: str) -> Steps[None]:
        key_end, value_end = Markers(f"</arg_key{word}>"), Markers(f"</arg_value{word}>")
        name, _ = yield from source.until(Markers(f"<tool_sep{word}>"), MOST_NAME)
        yield calls.begin(name.strip())
        arguments = NamedArguments(calls)
        yield from source.skip_space()
        while (yield from source.skip(f"<arg_key{word}>")):
            key, _ = yield from source.until(key_end, MOST_NAME)
            yield from source.skip_space()
            yield from source.expect(f"<arg_value{word}>")
            yield from arguments.raw(source, key.strip(), value_end)
            yield from source.skip_space()
        yield from source.expect(f"</tool_call{word}>")
        yield arguments.end()
        yield calls.end()
