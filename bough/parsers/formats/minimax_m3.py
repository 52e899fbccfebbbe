"""MiniMax M3: tags that begin with a token of their own, `]<]minimax[>[`. An argument is a tag by its name; objects and
lists are tags inside of it, those of a list are called `item`. Values are written without quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bough.parsers.calls import Calls, NamedArguments, read_blocks
from bough.parsers.json_text import MAX_DEPTH
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps
from bough.parsers.values import json_of, kinds_of

TOKEN = "]<]minimax[>["
SECTION, SECTION_END = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
INVOKE, INVOKE_END = f'{TOKEN}<invoke name="', f"{TOKEN}</invoke>"
TAG, END_TAG = f"{TOKEN}<", f"{TOKEN}</"
OPENING = Markers(SECTION, before=SPACE)
TAG_END = Markers(">")
NAME_END = Markers('">')
ITEM = "item"


class MiniMaxM3:
    """No grammar is made for its calls."""

    shape = None

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, OPENING, self._section)

    def _section(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        while True:
            yield from source.skip_space()
            yield from source.expect(INVOKE)
            yield from self._call(source, calls)
            source.mark()
            yield from source.skip_space()
            if not (yield from source.starts(INVOKE)):
                break
        yield from source.skip_end(SECTION_END)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        name, _ = yield from source.until(NAME_END, MOST_NAME)
        yield calls.begin(name)
        arguments = NamedArguments(calls)
        while (tag := (yield from _next_tag(source))) is not None:
            schema = calls.schema_of(tag)
            if (yield from _is_nested(source, schema)):
                yield arguments.value(tag, (yield from _nested(source, tag, schema, 1)))
            else:
                yield from arguments.raw(source, tag, Markers(f"{END_TAG}{tag}>"))
        yield from source.expect(INVOKE_END)
        yield arguments.end()
        yield calls.end()


def _next_tag(source: Source) -> Steps[str | None]:
    """The name of the next tag, which is used; None where one is closed instead."""
    yield from source.skip_space()
    if (yield from source.starts(END_TAG)):
        return None
    yield from source.expect(TAG)
    tag, _ = yield from source.until(TAG_END, MOST_NAME)
    return tag.strip()


def _is_nested(source: Source, schema: Any) -> Steps[bool]:
    """Whether a tag has tags in it; one that is empty is an object or a list if its schema says so."""
    if (yield from source.starts_after_space(END_TAG)):
        return bool({"object", "array"} & (kinds_of(schema) or set()))
    return (yield from source.starts_after_space(TAG))


def _nested(source: Source, tag: str, schema: Any, depth: int) -> Steps[Any]:
    """The object or list in a tag, up to its end."""
    if depth > MAX_DEPTH:
        raise MalformedError("too deep")
    children: list[tuple[str, Any]] = []
    while (child := (yield from _next_tag(source))) is not None:
        inner = _schema_in(schema, child)
        if (yield from _is_nested(source, inner)):
            value = yield from _nested(source, child, inner, depth + 1)
        else:
            text, _ = yield from source.until(Markers(f"{END_TAG}{child}>"))
            value = json.loads(json_of(text, inner))
        children.append((child, value))
    yield from source.expect(f"{END_TAG}{tag}>")
    names = [name for name, _ in children]
    if "array" in (kinds_of(schema) or ()) or (names and set(names) == {ITEM} and len(names) > 1):
        return [value for _, value in children]
    if len(set(names)) < len(names):
        raise MalformedError("a member is given twice")
    return dict(children)


def _schema_in(schema: Any, tag: str) -> Any:
    """The schema of what a tag holds, inside of another's."""
    if not isinstance(schema, Mapping):
        return None
    if tag == ITEM and "array" in (kinds_of(schema) or ()):
        return schema.get("items")
    properties = schema.get("properties")
    found = properties.get(tag) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties") if found is None else found
