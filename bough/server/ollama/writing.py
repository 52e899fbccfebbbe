"""From the engine's answers to Ollama's objects: one, or a stream of lines of which the last has the figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET

from bough.client.answer import Answer
from bough.client.handle import raise_if_refused
from bough.client.piece import Piece
from bough.core.finish import finish_to_dict
from bough.server.errors import Failure, ollama_shape
from bough.server.ollama.objects import ChatAnswer, ChatMessage, GenerateAnswer
from bough.server.responses import encode_json

LINES = "application/x-ndjson"
# Clients read line by line, and JSON may begin with a space: this keeps a connection open without making a line.
KEEP_ALIVE = b" "


def line(content: Any) -> bytes:
    return encode_json(content) + b"\n"


def timestamp(seconds: float) -> str:
    """Seconds since 1970 in ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What one call's answer looks like: a chat's message, or a completion's response."""

    model: str
    chat: bool
    timed: bool
    clock: Callable[[], float] = time.time  # each object, and so each line of a stream, tells when it was made

    def whole(self, answer: Answer) -> ChatAnswer | GenerateAnswer:
        """The answer that is not streamed."""
        return self._finished(answer, answer.text)

    def last(self, answer: Answer) -> ChatAnswer | GenerateAnswer:
        """The last line of a stream, whose text has all been shown."""
        return self._finished(answer, "")

    def loaded(self) -> ChatAnswer | GenerateAnswer:
        """The answer to those who only want the model to be there."""
        return self.show("", done=True, done_reason="load")

    def show(self, text: str, **more: Any) -> ChatAnswer | GenerateAnswer:
        common = {"model": self.model, "created_at": timestamp(self.clock()), **more}
        if self.chat:
            return ChatAnswer(message=ChatMessage(content=text), **common)
        return GenerateAnswer(response=text, **common)

    def _finished(self, answer: Answer, text: str) -> ChatAnswer | GenerateAnswer:
        raise_if_refused(answer)
        assert answer.finish is not None
        spent = answer.timings
        return self.show(
            text,
            done=True,
            done_reason=finish_to_dict(answer.finish)["type"],
            total_duration=_nanoseconds(spent.total_s),
            load_duration=_nanoseconds(spent.queue_s),
            prompt_eval_count=answer.prompt_tokens,
            prompt_eval_duration=_nanoseconds(spent.prefill_s),
            eval_count=len(answer.ids),
            eval_duration=_nanoseconds(spent.decode_s),
            timings=spent.to_dict() if self.timed else UNSET,
            warnings=list(answer.warnings) or UNSET,
        )


class LineWriter:
    """Writes one call's stream."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form

    def chunk(self, piece: Piece) -> bytes:
        """A line for new text; with the last piece the figures, on a line of their own."""
        text = line(self._form.show(piece.text, done=False)) if piece.text else b""
        return text if piece.finish is None else text + line(self._form.last(piece.answer))

    def end(self) -> bytes:
        return b""  # all is said with the last piece


def broken_stream(failure: Failure) -> bytes:
    """The last line of a stream that cannot go on."""
    return line(ollama_shape(failure))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
