"""Formats whose arguments are nested values in a notation of their own. No grammar is made for their calls."""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from bough.parsers.formats.base import BlockFormat, Calls, NamedArguments, read_calls
from bough.parsers.json_text import MAX_DEPTH
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps
from bough.parsers.values import json_of, kinds_of, read_json, to_json

NAME = re.compile(r"[\w.\-]*")
JSON_WORDS = {"true": True, "false": False, "null": None}
OPEN, CLOSE = "([{", ")]}"


class Pythonic(BlockFormat):
    """`[name(key="value"), other(n=1)]`: calls in Python's syntax (Llama 4, LFM2), anywhere or, if `marked`, behind
    `opening`. A value is passed on when it is complete, because Python spells it differently than JSON."""

    def __init__(self, opening: str, closing: str, *, marked: bool) -> None:
        self._opening = opening
        self.OPENING = Markers(opening, before=SPACE) if marked else Markers("[", opening, before=SPACE)
        self._closing = closing

    def block(self, source: Source, calls: Calls, marker: str) -> Steps[None]:
        if marker == self._opening:
            yield from source.expect_after_space("[")
        yield from read_calls(source, calls, _python_call, "]", separator=",")
        if marker == self._opening:
            yield from source.close(self._closing)


def _python_call(source: Source, calls: Calls) -> Steps[None]:
    name = yield from source.word(NAME)
    yield from source.expect("(")
    yield calls.begin(name)
    arguments = NamedArguments(calls)
    yield from source.skip_space()
    while not (yield from source.skip(")")):
        key = yield from source.word(NAME)
        yield from source.expect_after_space("=")
        text = yield from _expression(source)
        yield arguments.value(key, _value_of(text))
        if (yield from source.skip(",")):
            yield from source.skip_space()
    yield from arguments.end(source)


def _expression(source: Source) -> Steps[str]:
    """The text up to the comma or bracket that ends it, which stays."""
    depth = 0
    quote = ""
    escaped = False
    pieces: list[str] = []
    while True:
        for at in range(source.at, len(source.text)):
            character = source.text[at]
            if quote:
                if escaped:
                    escaped = False
                elif character == "\\":
                    escaped = True
                elif character == quote:
                    quote = ""
            elif character in "'\"":
                quote = character
            elif not depth and character in ",)":
                pieces.append(source.take(at))
                return "".join(pieces).strip()
            else:
                depth += (character in OPEN) - (character in CLOSE)
        pieces.append(source.take(len(source.text)))
        yield from source.more()


def _value_of(text: str) -> Any:
    if text in JSON_WORDS:
        return JSON_WORDS[text]
    try:
        with warnings.catch_warnings(action="ignore"):  # a backslash that begins no escape is just a backslash
            value = ast.literal_eval(text)
        to_json(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise MalformedError("no value") from None
    return value


LLAMA4 = Pythonic("<|python_start|>", "<|python_end|>", marked=False)
LFM2 = Pythonic("<|tool_call_start|>", "<|tool_call_end|>", marked=True)


# ---- Gemma 4

QUOTE = '<|"|>'
STRING_END, NAME_END, KEY_END = Markers(QUOTE), Markers("{"), Markers(":")
BARE = re.compile(r"[^,}\]<]*")  # what stands without quotes


class Gemma(BlockFormat):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,n:[1,true]}<tool_call|>`: strings have their own quotes, keys none."""

    OPENING = Markers("<|tool_call>", before=SPACE)

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from source.expect_after_space("call:")
        name, _ = yield from source.until(NAME_END, MOST_NAME)
        yield calls.begin(name.strip())
        arguments = NamedArguments(calls)
        while (key := (yield from _next_key(source))) is not None:
            if (yield from source.skip(QUOTE)):
                yield from arguments.raw(source, key, STRING_END, is_text=True)
            else:
                yield arguments.value(key, (yield from _value(source, 1)))
        yield from arguments.end(source)
        yield from source.close("<tool_call|>")


def _next_key(source: Source) -> Steps[str | None]:
    yield from source.skip_space()
    yield from source.skip(",")
    yield from source.skip_space()
    if (yield from source.skip("}")):
        return None
    key, _ = yield from source.until(KEY_END, MOST_NAME)
    yield from source.skip_space()
    return key.strip().removeprefix(QUOTE).removesuffix(QUOTE)


def _value(source: Source, depth: int) -> Steps[Any]:
    """A value inside of arguments, when it is complete."""
    if depth > MAX_DEPTH:
        raise MalformedError("too deep")
    if (yield from source.skip(QUOTE)):
        return (yield from source.until(STRING_END))[0]
    if (yield from source.skip("{")):
        return (yield from _object(source, depth))
    if (yield from source.skip("[")):
        return (yield from _list(source, depth))
    text = (yield from source.word(BARE)).strip()
    try:
        return read_json(text)
    except ValueError:
        if not text:
            raise MalformedError("no value") from None
        return text


def _object(source: Source, depth: int) -> Steps[dict[str, Any]]:
    members: dict[str, Any] = {}
    while (key := (yield from _next_key(source))) is not None:
        if key in members:
            raise MalformedError(f"{key!r} is given twice")
        members[key] = yield from _value(source, depth + 1)
    return members


def _list(source: Source, depth: int) -> Steps[list[Any]]:
    elements: list[Any] = []
    while True:
        yield from source.skip_space()
        if elements:
            yield from source.skip(",")
            yield from source.skip_space()
        if (yield from source.skip("]")):
            return elements
        elements.append((yield from _value(source, depth + 1)))


# ---- MiniMax M3

TOKEN = "]<]minimax[>["
SECTION, SECTION_END = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
INVOKE, INVOKE_END = f'{TOKEN}<invoke name="', f"{TOKEN}</invoke>"
TAG, END_TAG = f"{TOKEN}<", f"{TOKEN}</"
TAG_END = Markers(">")
ITEM = "item"


class MiniMaxM3(BlockFormat):
    """Tags that begin with a token of their own. An argument is a tag by its name; objects and lists are tags inside of
    it, those of a list are called `item`. Values are written without quotes."""

    OPENING, NAME_END = Markers(SECTION, before=SPACE), Markers('">')

    def block(self, source: Source, calls: Calls, _: str) -> Steps[None]:
        yield from read_calls(source, calls, self._call, SECTION_END, opening=INVOKE)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        name, _ = yield from source.until(self.NAME_END, MOST_NAME)
        yield calls.begin(name)
        arguments = NamedArguments(calls)
        while (tag := (yield from _next_tag(source))) is not None:
            schema = calls.schema_of(tag)
            if (yield from _is_nested(source, schema)):
                yield arguments.value(tag, (yield from _nested(source, tag, schema, 1)))
            else:
                yield from arguments.raw(source, tag, Markers(f"{END_TAG}{tag}>"))
        yield from arguments.end(source, INVOKE_END)


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
