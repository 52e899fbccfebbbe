"""`{"name": ..., "arguments": {...}}`: a call as a JSON object, alone or in a list; many formats are this in tags."""

from __future__ import annotations

import json

from bough.parsers.calls import Calls
from bough.parsers.json_text import json_text
from bough.parsers.source import MalformedError, Source, Steps

ARGUMENTS = ("arguments", "parameters")
IGNORED = ("id", "type")


def call_object(source: Source, calls: Calls) -> Steps[None]:
    """One call. Its members come in any order; arguments that come before the name wait for it."""
    name: str | None = None
    given = False
    waiting = ""
    yield from source.expect("{")
    while True:
        key = yield from _key(source)
        if key == "name" and name is None:
            name = yield from _string(source)
            yield calls.begin(name)
            if waiting:
                yield calls.arguments(waiting)
        elif key in ARGUMENTS and not given:
            given = True
            if (yield from source.peek()) == "n":
                yield from source.expect("null")
                given = False
            elif name is not None:
                yield from calls.json_arguments(source)
            elif (yield from source.peek()) == "{":
                waiting = yield from json_text(source)
            else:
                raise MalformedError("arguments that are no object")
        elif key in IGNORED:
            yield from json_text(source)
        else:
            raise MalformedError(f"what is {key!r}")
        yield from source.skip_space()
        if not (yield from source.skip(",")):
            break
    yield from source.expect("}")
    if name is None:
        raise MalformedError("no name")
    if not given:
        yield calls.arguments("{}")
    yield calls.end()


def call_list(source: Source, calls: Calls) -> Steps[None]:
    """`[call, call]`. Each call stands by itself: should a later one be malformed, the earlier ones hold."""
    yield from source.expect("[")
    while True:
        yield from source.skip_space()
        yield from call_object(source, calls)
        source.mark()
        yield from source.skip_space()
        if not (yield from source.skip(",")):
            break
    yield from source.skip_end("]")


def _key(source: Source) -> Steps[str]:
    yield from source.skip_space()
    key = yield from _string(source)
    yield from source.skip_space()
    yield from source.expect(":")
    yield from source.skip_space()
    return key


def _string(source: Source) -> Steps[str]:
    if (yield from source.peek()) != '"':
        raise MalformedError("no string")
    text = yield from json_text(source)
    value: str = json.loads(text)
    return value
