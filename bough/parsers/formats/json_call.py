"""`{"name": ..., "arguments": {...}}`: a call as a JSON object, alone or in a list; many formats are this in tags."""

from __future__ import annotations

import json

from bough.parsers.calls import Calls
from bough.parsers.json_text import json_text
from bough.parsers.source import MalformedError, Source, Steps
from bough.parsers.values import read_json, to_json

NAME = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters", "args")
IGNORED = ("id", "type", "tool_call_id")


def call_object(source: Source, calls: Calls) -> Steps[None]:
    """One call. Its members come in any order; arguments that come before the name wait for it."""
    name: str | None = None
    given = False
    waiting = ""
    yield from source.expect("{")
    while True:
        key = yield from _key(source)
        if key in NAME and name is None:
            name = yield from json_string(source)
            yield calls.begin(name)
            if waiting:
                yield calls.arguments(waiting)
        elif key in ARGUMENTS and not given:
            given = True
            first = yield from source.peek()
            if first == "n":
                yield from source.expect("null")
                given = False
            elif first == '"':
                waiting = yield from _quoted_object(source)
                if name is not None:
                    yield calls.arguments(waiting)
            elif name is not None:
                yield from calls.json_arguments(source)
            elif first == "{":
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


def _quoted_object(source: Source) -> Steps[str]:
    """The JSON of an object, which some models write as a string."""
    text = yield from json_string(source)
    try:
        value = read_json(text)
        if isinstance(value, dict):
            return to_json(value)
    except (ValueError, RecursionError):
        pass
    raise MalformedError("arguments that are no object")


def _key(source: Source) -> Steps[str]:
    yield from source.skip_space()
    key = yield from json_string(source)
    yield from source.skip_space()
    yield from source.expect(":")
    yield from source.skip_space()
    return key


def json_string(source: Source) -> Steps[str]:
    """The string that comes next."""
    if (yield from source.peek()) != '"':
        raise MalformedError("no string")
    text = yield from json_text(source)
    value: str = json.loads(text)
    return value
