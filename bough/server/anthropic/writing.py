"""From the engine's answers to Anthropic's messages, whole or as events.

A stream is: message_start, content_block_start, ping, one content_block_delta for each piece of text,
content_block_stop, message_delta with the reason of the end and the usage, message_stop. Answers that are parsed
may have several blocks (thinking, text, calls), in the order in which the model wrote them.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from bough import parsers
from bough.client.outputs import Piece, RequestOutput
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.server.errors import Failure, anthropic_shape
from bough.server.parsing import CallIds, StreamParser
from bough.server.streaming import Writer, named_event, warnings_of

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost. As Anthropic counts, `input_tokens` are those that did not come out of the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # everything is cached, at no cost
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # nobody checks it here


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/messages; in a stream, how it begins."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage
    timings: Any = UNSET
    warnings: Any = UNSET


class TokensCount(msgspec.Struct, frozen=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


PREFIX = "toolu_"


def whole_blocks(events: Iterable[parsers.Event]) -> list[Block]:
    """A finished answer's blocks. There is at least one, be it an empty text."""
    blocks: list[Block] = []
    ids = CallIds(PREFIX)
    shown: Iterator[Any] = (each for each in parsers.Call.join(events) if isinstance(each, parsers.Call) or each.text)
    for kind, run in itertools.groupby(shown, type):
        if kind is parsers.Call:
            blocks += [ToolUseBlock(id=ids.name(e), name=e.name, input=msgspec.json.decode(e.arguments)) for e in run]
        else:
            text = "".join(event.text for event in run)
            blocks.append(TextBlock(text=text) if kind is parsers.Text else ThinkingBlock(thinking=text))
    return blocks or [TextBlock(text="")]


class BlockWriter:
    """Writes the events of blocks; one block is open at a time."""

    def __init__(self) -> None:
        self._ids = CallIds(PREFIX)
        self._index = -1
        self._open: type[Block] | None = None

    def write(self, event: parsers.Event) -> bytes:
        match event:
            case parsers.Text() | parsers.CallFailed():
                return self._say(TextBlock(text=""), "text", event.text) if event.text else b""
            case parsers.Reasoning():
                return self._say(ThinkingBlock(thinking=""), "thinking", event.text)
            case parsers.CallBegin():
                return self.begin(ToolUseBlock(id=self._ids.name(event), name=event.name, input={}))
            case parsers.CallArguments():
                return self._delta("input_json", "partial_json", event.text)
            case parsers.CallEnd():
                return self._end()

    def begin(self, block: Block) -> bytes:
        closing = self._end()
        self._index += 1
        self._open = type(block)
        return closing + named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def close(self) -> bytes:
        return self._end() if self._index >= 0 else self.begin(TextBlock(text="")) + self._end()

    def _say(self, block: Block, kind: str, text: str) -> bytes:
        """More of a block of this kind, which begins if another one is open."""
        opening = b"" if self._open is type(block) else self.begin(block)
        return opening + self._delta(kind, kind, text)

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        delta = {"type": f"{kind}_delta", field: text}
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta("signature", "signature", "") if self._open is ThinkingBlock else b""
        self._open = None
        return signed + named_event({"type": "content_block_stop", "index": self._index})


PING = named_event({"type": "ping"})
MESSAGE_ENDS = named_event({"type": "message_stop"})


class MessageWriter(Writer):
    def __init__(self, id: str, model: str, timed: bool | None, form: parsers.AnswerFormat | None = None) -> None:
        self._id = id
        self._model = model
        self.timed = timed
        self._form = form or parsers.AnswerFormat()
        self._begun = False
        self._blocks = BlockWriter()
        self._parser = StreamParser(self._form)
        # The message's beginning and a ping stand before the text; plain text also has its one block begin there.
        self.opening_events = 3 if self._form.plain else 2

    def whole(self, answers: list[RequestOutput]) -> Message:
        (answer,) = answers
        parser = parsers.AnswerParser(self._form)
        events: list[parsers.Event] = [*parser.feed(answer.text), *parser.finish()]
        return Message(
            id=self._id,
            model=self._model,
            content=whole_blocks(events),
            **stop_of(answer, called=any(isinstance(event, parsers.CallEnd) for event in events)),
            usage=usage_of(answer),
            **self._extras(answer),
        )

    def chunk(self, piece: Piece) -> bytes:
        """The events for a piece; with the first and the last one, what stands around the text."""
        opening = b"" if self._begun else self._begin(piece.answer)
        news = b"".join(map(self._blocks.write, self._parser.events(piece)))
        return opening + news + (b"" if piece.finish is None else self._blocks.close() + self._end(piece.answer))

    def _begin(self, answer: RequestOutput) -> bytes:
        """The first events; none where this stream resumes another, which has sent them and some text."""
        self._begun = True
        block = self._blocks.begin(TextBlock(text="")) if self._form.plain else b""
        if not answer.resumed:
            usage = usage_of(answer, output_tokens=0)
            message = Message(
                id=self._id, model=self._model, content=[], stop_reason=None, stop_sequence=None, usage=usage
            )
            return named_event({"type": "message_start", "message": message}) + block + PING
        for past in self._parser.replay(answer.resumed_text):
            self._blocks.write(past)
        return b""

    def _end(self, answer: RequestOutput) -> bytes:
        stop = stop_of(answer, called=self._parser.called)
        event = {"type": "message_delta", "delta": stop, "usage": usage_of(answer)}
        return named_event(event | self._extras(answer)) + MESSAGE_ENDS

    def _extras(self, answer: RequestOutput) -> dict[str, Any]:
        """What Anthropic's answers do not have; its clients pass it on."""
        timings = {"timings": answer.timings} if self.timed else {}
        return timings | ({"warnings": said} if (said := warnings_of([answer])) else {})

    def failure(self, failure: Failure) -> bytes:
        return named_event(anthropic_shape(failure))


def stop_of(answer: RequestOutput, *, called: bool) -> dict[str, Any]:
    """Why the answer ended, and at which of the client's stop sequences; `called`: it has calls. Raises for an aborted
    answer, for which the protocol has no reason."""
    reason, sequence = "tool_use" if called else "end_turn", None
    match answer.finish:
        case FinishStop(matched=str(matched)):
            reason, sequence = "stop_sequence", matched
        case FinishLength():
            reason = "max_tokens"
        case FinishAbort():
            raise RequestError("The request was aborted.", status_code=499, err_type="AbortError")
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_of(answer: RequestOutput, output_tokens: int | None = None) -> Usage:
    return Usage(
        input_tokens=answer.prompt_tokens - answer.cached_tokens,
        cache_read_input_tokens=answer.cached_tokens,
        output_tokens=len(answer.ids) if output_tokens is None else output_tokens,
    )
