"""What Ollama's clients get back: one object, or a stream of lines of which the last has the figures.

Durations are in nanoseconds. Fields that are `UNSET` do not appear at all.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from bough.client.outputs import Piece, RequestOutput
from bough.parsers import AnswerFormat, Call, Reasoning, Text
from bough.parsers.events import Begun
from bough.server.endpoint import encode_json
from bough.server.errors import Failure, ollama_shape
from bough.server.parsing import StreamParser
from bough.server.streaming import Writer, warnings_of

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


class LineWriter(Writer):
    """`chat`: the answer is a chat's message, else a completion's response."""

    media_type = LINES
    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        model: str,
        *,
        chat: bool,
        timed: bool | None,
        form: AnswerFormat | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._chat = chat
        self.timed = timed
        self._form = form or AnswerFormat()
        self._clock = clock  # each object, and so each line of a stream, has its own time
        self._parser = StreamParser(self._form)
        self._begun: Begun = {}  # the call that is being written

    def whole(self, answers: list[RequestOutput]) -> ChatAnswer | GenerateAnswer:
        (answer,) = answers
        parsed = self._form.parse(answer.text)
        return self._finished(answer, message_of(parsed.text, parsed.reasoning, parsed.calls))

    def loaded(self) -> ChatAnswer | GenerateAnswer:
        """The answer to those who only want the model to be there."""
        return self.show(message_of(""), done=True, done_reason="load")

    def chunk(self, piece: Piece) -> bytes:
        """A line for new text; with the last piece the figures, on a line of their own."""
        news = b"".join(map(self._line, Call.join(self._parser.events(piece), self._begun)))
        return news if piece.finish is None else news + line(self._finished(piece.answer, message_of("")))

    def failure(self, failure: Failure) -> bytes:
        return line(ollama_shape(failure))

    def show(self, message: ChatMessage, **more: Any) -> ChatAnswer | GenerateAnswer:
        """A message in the object of its route; completions have no calls."""
        common = {"model": self._model, "created_at": timestamp(self._clock()), **more}
        if self._chat:
            return ChatAnswer(message=message, **common)
        return GenerateAnswer(response=message.content, thinking=message.thinking, **common)

    def _line(self, event: Text | Reasoning | Call) -> bytes:
        """A call gets one line, when it is complete."""
        match event:
            case Text():
                return self._shown(event.text) if event.text else b""
            case Reasoning():
                return self._shown("", event.text)
            case Call():
                return self._shown("", "", [event])

    def _shown(self, text: str, thinking: str = "", calls: Sequence[Call] = ()) -> bytes:
        return line(self.show(message_of(text, thinking, calls), done=False))

    def _finished(self, answer: RequestOutput, message: ChatMessage) -> ChatAnswer | GenerateAnswer:
        assert answer.finish is not None
        spent = answer.timings
        return self.show(
            message,
            done=True,
            done_reason=answer.finish.kind,
            total_duration=_nanoseconds(spent.total_s),
            load_duration=_nanoseconds(spent.queue_s),
            prompt_eval_count=answer.prompt_tokens,
            prompt_eval_duration=_nanoseconds(spent.prefill_s),
            eval_count=len(answer.ids),
            eval_duration=_nanoseconds(spent.decode_s),
            timings=spent if self.timed else UNSET,
            warnings=warnings_of([answer]),
        )


def message_of(text: str, thinking: str = "", calls: Sequence[Call] = ()) -> ChatMessage:
    shown = [ToolCall(CalledFunction(call.name, msgspec.json.decode(call.arguments))) for call in calls]
    return ChatMessage(content=text, thinking=thinking or UNSET, tool_calls=shown or UNSET)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
