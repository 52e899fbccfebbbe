"""The items of a response: from input items to the messages of a conversation, and from an answer to output items.

`ItemWriter` turns a parser's events into the events of a stream and keeps the items that these amount to; a response
that is not streamed is made by the same steps, whose events are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.core.errors import RequestError
from bough.parsers import CallArguments, CallBegin, CallEnd, CallFailed, Event, Reasoning, Text
from bough.server.messages import ROLES, Message, check_size, read_content, read_message, read_messages
from bough.server.openai.response_objects import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    FunctionCallItem,
    Item,
    ItemEvent,
    ItemStatus,
    OutputMessage,
    OutputText,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ReasoningItem,
    ReasoningText,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
)
from bough.server.parsing import CallIds

KINDS = ("message", "function_call", "function_call_output", "reasoning")


def read_input(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """The new turns of the conversation. Calls and thinking that follow each other are one turn of the assistant's."""
    if isinstance(given, str):
        return read_messages([{"role": "user", "content": given}], "input")
    if not given:
        read_messages(given, "input")  # which refuses it
    check_size(given, "input")
    names = {item.get("call_id"): item.get("name") for item in given if item.get("type") == "function_call"}
    runs: list[_Run] = []
    for i, item in enumerate(given):
        turn = _read_item(item, f"input[{i}]", names)
        if not runs or not runs[-1].takes(turn):
            runs.append(_Run())
        runs[-1].add(turn)
    return [run.joined() for run in runs]


def output_messages(output: Sequence[Item]) -> list[Message]:
    """The assistant's messages that these items amount to, for the turns that follow. A failed call is text, too."""
    run = _Run()
    for item in output:
        match item:
            case OutputMessage():
                turn: Message = {"role": "assistant", "content": "".join(part.text for part in item.content)}
            case FunctionCallItem() if item.status != "completed":
                continue
            case FunctionCallItem():
                turn = _call_turn(item.call_id, item.name, item.arguments, "output")
            case ReasoningItem():
                turn = _thinking_turn("".join(part.text for part in item.content))
        run.add(turn)
    return [run.joined()] if run.turns else []


def _read_item(item: Mapping[str, Any], where: str, names: Mapping[Any, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        read = read_message(item, where, ROLES)
        return {"role": read["role"], "content": read["content"]}
    if kind == "function_call":
        return _call_turn(item.get("call_id"), item.get("name"), item.get("arguments"), where)
    if kind == "function_call_output":
        id = item.get("call_id")
        if not isinstance(id, str):
            raise RequestError(f"{where}.call_id must be the id of a call.", field=where)
        content = read_content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": id, "name": names.get(id) or "", "content": content}
    if kind == "reasoning":
        parts = item.get("content") or ()
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        return _thinking_turn("".join(text for text in texts if isinstance(text, str)))
    raise RequestError(
        f"{where}: items of type {kind!r} are not supported by this server; send {', '.join(KINDS)}.", field=where
    )


def _call_turn(id: Any, name: Any, arguments: Any, where: str) -> Message:
    if not isinstance(id, str) or not isinstance(name, str):
        raise RequestError(f"{where} must have a call_id and a name.", field=where)
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return read_message({"role": "assistant", "content": "", "tool_calls": [call]}, where, ROLES)


def _thinking_turn(text: str) -> Message:
    return {"role": "assistant", "content": "", "reasoning_content": text}


class _Run:
    """Turns that are one. Joined at once: two by two, their texts would be copied over and over."""

    def __init__(self) -> None:
        self.turns: list[Message] = []
        self._more_than_said = False  # there is a call, or thinking, among them

    def takes(self, turn: Message) -> bool:
        """Whether the turn belongs to this run: all are the assistant's, and not all of them plain text."""
        both = self.turns[-1]["role"] == turn["role"] == "assistant"
        return both and (self._more_than_said or _more_than_said(turn))

    def add(self, turn: Message) -> None:
        self.turns.append(turn)
        self._more_than_said = self._more_than_said or _more_than_said(turn)

    def joined(self) -> Message:
        joined: Message = {name: value for turn in self.turns for name, value in turn.items()}
        joined["content"] = "".join(turn["content"] for turn in self.turns)
        calls = [call for turn in self.turns for call in turn.get("tool_calls", ())]
        return {**joined, "tool_calls": calls} if calls else joined


def _more_than_said(turn: Message) -> bool:
    return "tool_calls" in turn or "reasoning_content" in turn


@dataclass(slots=True)
class _Open:
    """The item that is being written: a call if it has a name, else text of one of two kinds."""

    id: str
    index: int
    is_reasoning: bool = False
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def item(self, status: ItemStatus) -> Item:
        if self.name:
            return FunctionCallItem(
                id=self.id, call_id=self.call_id, name=self.name, arguments=self.text, status=status
            )
        if self.is_reasoning:
            content = [ReasoningText(text=self.text)] if self.pieces else []
            return ReasoningItem(id=self.id, content=content, status=status)
        return OutputMessage(id=self.id, status=status, content=[OutputText(text=self.text)] if self.pieces else [])

    def part(self) -> OutputText | ReasoningText:
        return ReasoningText(text=self.text) if self.is_reasoning else OutputText(text=self.text)


class ItemWriter:
    """Writes one response's items; one is open at a time."""

    def __init__(self, suffix: str, number: Callable[[], int]) -> None:
        """`suffix` makes ids of this response; `number` counts the events of its stream."""
        self.items: list[Item] = []  # those that are complete, and what failed to become a call
        self.failed: list[Item] = []  # of them, the latter
        self._suffix = suffix
        self._number = number
        self._ids = CallIds()
        self._open: _Open | None = None

    def write(self, event: Event) -> Iterator[StreamEvent]:
        match event:
            case Text():
                yield from self._say(event.text, is_reasoning=False)
            case Reasoning():
                yield from self._say(event.text, is_reasoning=True)
            case CallBegin():
                yield from self._end("completed")
                self._open = _Open(self._id("fc"), len(self.items), name=event.name, call_id=self._ids.name(event))
                yield self._added()
            case CallArguments():
                opened = self._opened()
                opened.pieces.append(event.text)
                kind = "response.function_call_arguments.delta"
                yield ArgumentsDeltaEvent(kind, opened.id, opened.index, event.text, self._number())
            case CallEnd():
                yield from self._end("completed")
            case CallFailed():
                yield from self._end("incomplete")
                self.failed.append(self.items[-1])
                yield from self._say(event.text, is_reasoning=False)

    def close(self, status: ItemStatus) -> Iterator[StreamEvent]:
        """After the last event. A response without anything in it has an empty message."""
        if not self.items and self._open is None:
            yield from self._begin_text(is_reasoning=False)
        yield from self._end(status)

    def _say(self, text: str, *, is_reasoning: bool) -> Iterator[StreamEvent]:
        """More text of this kind, in a new item if something else is open."""
        if not text:
            return
        if self._open is None or self._open.name or self._open.is_reasoning is not is_reasoning:
            yield from self._end("completed")
            yield from self._begin_text(is_reasoning=is_reasoning)
        opened = self._opened()
        opened.pieces.append(text)
        if is_reasoning:
            kind = "response.reasoning_text.delta"
            yield ReasoningDeltaEvent(kind, opened.id, opened.index, 0, text, self._number())
        else:
            yield TextDeltaEvent("response.output_text.delta", opened.id, opened.index, 0, text, [], self._number())

    def _begin_text(self, *, is_reasoning: bool) -> Iterator[StreamEvent]:
        self._open = _Open(self._id("rs" if is_reasoning else "msg"), len(self.items), is_reasoning)
        yield self._added()
        yield self._part_event("response.content_part.added")

    def _end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        opened = self._open
        if opened is None:
            return
        if opened.name:
            kind = "response.function_call_arguments.done"
            yield ArgumentsDoneEvent(kind, opened.id, opened.index, opened.name, opened.text, self._number())
        else:
            yield self._text_done(opened)
            yield self._part_event("response.content_part.done")
        item = opened.item(status)
        if isinstance(item, OutputMessage) and not item.content:
            item = OutputMessage(id=opened.id, status=status, content=[OutputText(text="")])
        self.items.append(item)
        self._open = None
        yield ItemEvent("response.output_item.done", opened.index, item, self._number())

    def _text_done(self, opened: _Open) -> StreamEvent:
        if opened.is_reasoning:
            kind = "response.reasoning_text.done"
            return ReasoningDoneEvent(kind, opened.id, opened.index, 0, opened.text, self._number())
        return TextDoneEvent("response.output_text.done", opened.id, opened.index, 0, opened.text, [], self._number())

    def _added(self) -> StreamEvent:
        opened = self._opened()
        return ItemEvent("response.output_item.added", opened.index, opened.item("in_progress"), self._number())

    def _part_event(self, kind: str) -> StreamEvent:
        opened = self._opened()
        return PartEvent(kind, opened.id, opened.index, 0, opened.part(), self._number())

    def _opened(self) -> _Open:
        assert self._open is not None
        return self._open

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self.items)}" if self.items else f"{prefix}_{self._suffix}"
