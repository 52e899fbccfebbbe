"""MiniCPM 5: `<function name="...">` with a `<param name="...">` for each argument. Values are written without quotes,
or, where they would be taken for tags, as CDATA."""

from __future__ import annotations

import re

from bough.parsers.calls import Calls, NamedArguments, read_blocks
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps

FUNCTION, FUNCTION_END = "<function name=", "</function>"
PARAM, PARAM_END = "<param name=", "</param>"
CDATA, CDATA_END = "<![CDATA[", "]]>"
OPENING = Markers(FUNCTION, before=SPACE)
TAG_END = Markers(">")
VALUE_END = Markers(PARAM_END)
QUOTED = re.compile(r"""\s*(["'])(?P<name>.*)\1\s*""")


class MiniCpm:
    """No grammar is made for its calls."""

    shape = None

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._call)

    def _call(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield calls.begin((yield from _name(source)))
        arguments = NamedArguments(calls)
        yield from source.skip_space()
        while (yield from source.skip(PARAM)):
            name = yield from _name(source)
            if (yield from source.skip(CDATA)):
                yield from arguments.raw(source, name, Markers(CDATA_END))
                yield from source.skip_space()
                yield from source.expect(PARAM_END)
            else:
                yield from arguments.raw(source, name, VALUE_END)
            yield from source.skip_space()
        yield from source.expect(FUNCTION_END)
        yield arguments.end()
        yield calls.end()


def _name(source: Source) -> Steps[str]:
    """The name in quotes behind `name=`, up to the end of its tag."""
    text, _ = yield from source.until(TAG_END, MOST_NAME)
    found = QUOTED.fullmatch(text)
    if found is None:
        raise MalformedError("no name")
    return found["name"]
