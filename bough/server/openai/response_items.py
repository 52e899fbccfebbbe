"""The response and its items: as data, from input items to the messages of a conversation, and from an answer to output
items.

`ItemWriter` turns a parser's events into the events of a stream and keeps the items; a response that is not streamed is
made the same way, without its events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from bough.core.errors import RequestError
from bough.parsers import CallArguments, CallBegin, CallEnd, CallFailed, Event, Reasoning, Text
from bough.server import messages
from bough.server.openai.objects import TokenLogprob
from bough.server.parsing import CallIds

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] | None = None
    token_ids: list[int] | UnsetType = UNSET


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought; it is shown whole, so there is no summary."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    status: ItemStatus


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response, from its creation to its end."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    model: str
    output: list[Item] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    store: bool
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    parallel_tool_calls: bool = True
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[Any] = []
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None
    meta_info: dict[str, Any] | UnsetType = UNSET
    timings: dict[str, Any] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


KINDS = ("message", "function_call", "function_call_output", "reasoning")
StreamEvent = dict[str, Any]


def read_input(given: str | Sequence[Mapping[str, Any]]) -> list[messages.Message]:
    """The new turns of the conversation. Calls and thinking that follow each other are one turn of the assistant's."""
    if isinstance(given, str):
        return messages.read_messages([{"role": "user", "content": given}], "input")
    messages.check_size(given, "input", spoken=True)
    names = {item.get("call_id"): item.get("name") for item in given if item.get("type") == "function_call"}
    turns = (_read_item(item, f"input[{i}]", names) for i, item in enumerate(given))
    return messages.join_runs(turns, _is_same_turn)


def _is_same_turn(run: list[messages.Message], turn: messages.Message) -> bool:
    """Whether a turn goes on with the assistant's: with calls or thinking among them, not two plain texts."""
    if not run[-1]["role"] == turn["role"] == "assistant":
        return False
    return len(run) > 1 or any("tool_calls" in each or "reasoning_content" in each for each in (run[0], turn))


def output_messages(output: Sequence[Item]) -> list[messages.Message]:
    """The assistant's messages that these items amount to, for the turns that follow. A failed call is text, too."""
    turns: list[messages.Message] = []
    for item in output:
        match item:
            case OutputMessage():
                turns.append({"role": "assistant", "content": "".join(part.text for part in item.content)})
            case FunctionCallItem() if item.status == "completed":
                turns.append(_call_turn(item.call_id, item.name, item.arguments, "output"))
            case ReasoningItem():
                turns.append(_thinking_turn("".join(part.text for part in item.content)))
    return [messages.joined_turns(turns)] if turns else []


def _read_item(item: Mapping[str, Any], where: str, names: Mapping[Any, Any]) -> messages.Message:
    kind = item.get("type", "message")
    if kind == "message":
        read = messages.read_message(item, where, messages.ROLES)
        return {"role": read["role"], "content": read["content"]}
    if kind == "function_call":
        return _call_turn(item.get("call_id"), item.get("name"), item.get("arguments"), where)
    if kind == "function_call_output":
        id = item.get("call_id")
        if not isinstance(id, str):
            raise RequestError(f"{where}.call_id must be the id of a call.", field=where)
        content = messages.read_content(item.get("output"), f"{where}.output", media=True)
        return {"role": "tool", "tool_call_id": id, "name": names.get(id) or "", "content": content}
    if kind == "reasoning":
        parts = item.get("content") or ()
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        return _thinking_turn("".join(text for text in texts if isinstance(text, str)))
    problem = f"{where}: items of type {kind!r} are not supported by this server; send {', '.join(KINDS)}."
    raise RequestError(problem, field=where)


def _call_turn(id: Any, name: Any, arguments: Any, where: str) -> messages.Message:
    if not isinstance(id, str) or not isinstance(name, str):
        raise RequestError(f"{where} must have a call_id and a name.", field=where)
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return messages.read_message({"role": "assistant", "content": "", "tool_calls": [call]}, where, messages.ROLES)


def _thinking_turn(text: str) -> messages.Message:
    return {"role": "assistant", "content": "", "reasoning_content": text}


@dataclass(slots=True)
class _Open:
    """The item that is being written: a call if it has a name, else text of one of two kinds."""

    id: str
    index: int
    is_reasoning: bool = False
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    def part(self) -> OutputText | ReasoningText:
        text = "".join(self.pieces)
        return ReasoningText(text=text) if self.is_reasoning else OutputText(text=text)

    def item(self, status: ItemStatus, part: OutputText | ReasoningText | None) -> Item:
        if self.name:
            call = {"call_id": self.call_id, "name": self.name, "arguments": "".join(self.pieces)}
            return FunctionCallItem(id=self.id, **call, status=status)
        if self.is_reasoning:
            thought = [part] if isinstance(part, ReasoningText) and part.text else []
            return ReasoningItem(id=self.id, content=thought, status=status)
        return OutputMessage(id=self.id, status=status, content=[part] if isinstance(part, OutputText) else [])


class ItemWriter:
    """Writes one response's items, one at a time, as events of its stream; the events' order of fields is OpenAI's."""

    def __init__(self, suffix: str) -> None:
        """`suffix` makes the items' ids unique to this response."""
        self.items: list[Item] = []  # those that are complete, and what failed to become a call
        self.failed: list[Item] = []  # of them, the latter
        self.events = 0  # how many there are so far
        self._suffix = suffix
        self._ids = CallIds()
        self._open: _Open | None = None

    def event(self, kind: str, **fields: Any) -> StreamEvent:
        number, self.events = self.events, self.events + 1
        return {"type": f"response.{kind}", **fields, "sequence_number": number}

    def write(self, event: Event) -> list[StreamEvent]:
        match event:
            case Text() | Reasoning():
                return self.say(event.text, is_reasoning=isinstance(event, Reasoning)) if event.text else []
            case CallBegin():
                return [*self._end("completed"), self._begin("fc", name=event.name, call_id=self._ids.name(event))]
            case CallArguments():
                self._opened.pieces.append(event.text)
                return [self._of_item("function_call_arguments.delta", delta=event.text)]
            case CallEnd():
                return self._end("completed")
            case CallFailed():
                ended = self._end("incomplete")
                self.failed.append(self.items[-1])
                return [*ended, *self.write(Text(event.text))]

    def say(self, text: str, *, is_reasoning: bool = False, logprobs: Sequence[TokenLogprob] = ()) -> list[StreamEvent]:
        """More text of this kind, in a new item if something else is open."""
        opening: list[StreamEvent] = []
        if self._open is None or self._open.name or self._open.is_reasoning is not is_reasoning:
            opening = [*self._end("completed"), *self.begin_text(is_reasoning=is_reasoning)]
        self._opened.pieces.append(text)
        if is_reasoning:
            return [*opening, self._of_item("reasoning_text.delta", content_index=0, delta=text)]
        return [*opening, self._of_item("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def begin_text(self, *, is_reasoning: bool = False) -> list[StreamEvent]:
        added = self._begin("rs" if is_reasoning else "msg", is_reasoning=is_reasoning)
        return [added, self._of_item("content_part.added", content_index=0, part=self._opened.part())]

    def close(self, status: ItemStatus, part: OutputText | None = None) -> list[StreamEvent]:
        """After the last event; `part` is the whole text where an answer is nothing else. A response without anything
        in it has an empty message."""
        opening = self.begin_text() if not self.items and self._open is None else []
        return [*opening, *self._end(status, part)]

    def _begin(self, prefix: str, **fields: Any) -> StreamEvent:
        suffix = f"{self._suffix}_{len(self.items)}" if self.items else self._suffix
        opened = self._open = _Open(f"{prefix}_{suffix}", len(self.items), **fields)
        return self.event("output_item.added", output_index=opened.index, item=opened.item("in_progress", None))

    def _end(self, status: ItemStatus, whole: OutputText | None = None) -> list[StreamEvent]:
        opened = self._open
        if opened is None:
            return []
        part = whole or opened.part()
        item = opened.item(status, part)
        if opened.name:
            done = [self._of_item("function_call_arguments.done", name=opened.name, arguments=part.text)]
        else:
            extra = {"logprobs": part.logprobs or []} if isinstance(part, OutputText) else {}
            kind = "reasoning_text.done" if opened.is_reasoning else "output_text.done"
            done = [
                self._of_item(kind, content_index=0, text=part.text, **extra),
                self._of_item("content_part.done", content_index=0, part=part),
            ]
        self.items.append(item)
        self._open = None
        return [*done, self.event("output_item.done", output_index=opened.index, item=item)]

    def _of_item(self, kind: str, **fields: Any) -> StreamEvent:
        return self.event(kind, item_id=self._opened.id, output_index=self._opened.index, **fields)

    @property
    def _opened(self) -> _Open:
        assert self._open is not None
        return self._open
