"""What Ollama's clients get back: one object, or a stream of lines of which the last has the figures.

Durations are in nanoseconds. Fields that are `UNSET` do not appear at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from bough.client.handle import raise_if_refused
from bough.client.outputs import Piece, RequestOutput
from bough.core.finish import finish_to_dict
from bough.parsers import AnswerFormat, Call, CallArguments, CallBegin, CallEnd, CallFailed, Event, Reasoning, Text
from bough.server.endpoint import encode_json
from bough.server.errors import Failure, in_client_names, ollama_shape
from bough.server.parsing import StreamParser

LINES = "application/x-ndjson"
# Clients read line by line, and JSON may begin with a space: this keeps a connection open without making a line.
KEEP_ALIVE = b" "


class AnswerObject(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or what is new in it. `load_duration` is the time in the queue: the model is always loaded."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "abort", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    timings: Any = UNSET
    warnings: Any = UNSET


class GenerateAnswer(AnswerObject, frozen=True, kw_only=True):
    """The answer of /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True):
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatAnswer(AnswerObject, frozen=True, kw_only=True):
    """The answer of /api/chat."""

    message: ChatMessage


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the server does not know is empty."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelList(msgspec.Struct, frozen=True):
    """The answer of /api/tags."""

    models: list[ModelEntry]


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /api/show."""

    modelfile: str
    parameters: str = ""
    template: str = ""
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


def line(content: Any) -> bytes:
    return encode_json(content) + b"\n"


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What one call's answer looks like: a chat's message, or a completion's response."""

    model: str
    chat: bool
    timed: bool
    clock: Callable[[], float] = time.time  # each object, and so each line of a stream, has its own time
    answers: AnswerFormat = field(default_factory=AnswerFormat)

    def whole(self, answer: RequestOutput) -> ChatAnswer | GenerateAnswer:
        parsed = self.answers.parse(answer.text)
        return self._finished(answer, self.message(parsed.text, parsed.reasoning, parsed.calls))

    def last(self, answer: RequestOutput) -> ChatAnswer | GenerateAnswer:
        """The last line of a stream, whose text has all been shown."""
        return self._finished(answer, self.message(""))

    def loaded(self) -> ChatAnswer | GenerateAnswer:
        """The answer to those who only want the model to be there."""
        return self.show(self.message(""), done=True, done_reason="load")

    def message(self, text: str, thinking: str = "", calls: Sequence[Call] = ()) -> ChatMessage:
        shown = [ToolCall(CalledFunction(call.name, msgspec.json.decode(call.arguments))) for call in calls]
        return ChatMessage(content=text, thinking=thinking or UNSET, tool_calls=shown or UNSET)

    def show(self, message: ChatMessage, **more: Any) -> ChatAnswer | GenerateAnswer:
        """A message in the object of its route; completions have no calls."""
        common = {"model": self.model, "created_at": timestamp(self.clock()), **more}
        if self.chat:
            return ChatAnswer(message=message, **common)
        return GenerateAnswer(response=message.content, thinking=message.thinking, **common)

    def _finished(self, answer: RequestOutput, message: ChatMessage) -> ChatAnswer | GenerateAnswer:
        raise_if_refused(answer)
        assert answer.finish is not None
        spent = answer.timings
        return self.show(
            message,
            done=True,
            done_reason=finish_to_dict(answer.finish)["type"],
            total_duration=_nanoseconds(spent.total_s),
            load_duration=_nanoseconds(spent.queue_s),
            prompt_eval_count=answer.prompt_tokens,
            prompt_eval_duration=_nanoseconds(spent.prefill_s),
            eval_count=len(answer.ids),
            eval_duration=_nanoseconds(spent.decode_s),
            timings=spent.to_dict() if self.timed else UNSET,
            warnings=list(map(in_client_names, answer.warnings)) or UNSET,
        )


class LineWriter:
    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._parser = StreamParser(form.answers)
        self._name = ""  # of the call that is being written
        self._arguments: list[str] = []

    def chunk(self, piece: Piece) -> bytes:
        """A line for new text; with the last piece the figures, on a line of their own."""
        news = b"".join(map(self._line, self._parser.events(piece)))
        return news if piece.finish is None else news + line(self._form.last(piece.answer))

    def _line(self, event: Event) -> bytes:
        """A call gets one line, when it is complete."""
        match event:
            case Text() | CallFailed():
                return self._shown(self._form.message(event.text)) if event.text else b""
            case Reasoning():
                return self._shown(self._form.message("", event.text))
            case CallBegin():
                self._name, self._arguments = event.name, []
            case CallArguments():
                self._arguments.append(event.text)
            case CallEnd():
                call = Call(self._name, "".join(self._arguments))
                return self._shown(self._form.message("", "", [call]))
        return b""

    def _shown(self, message: ChatMessage) -> bytes:
        return line(self._form.show(message, done=False))

    def end(self) -> bytes:
        return b""  # everything was sent with the last piece


def broken_stream(failure: Failure) -> bytes:
    return line(ollama_shape(failure))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
