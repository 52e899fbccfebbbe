"""From the engine's answers to Anthropic's messages, whole or as events.

A stream is: message_start, content_block_start, ping, one content_block_delta for each piece of text,
content_block_stop, message_delta with the reason of the end and the usage, message_stop. All but three of these are
the same in every stream of plain text, so they are encoded once. Answers that go through parsers may have several
blocks (thinking, text, calls), in the order in which the model wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from bough.client.handle import raise_if_refused
from bough.client.outputs import Piece, RequestOutput
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.parsers import (
    AnswerFormat,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    CallFailed,
    Event,
    Reasoning,
    Text,
)
from bough.server.anthropic.objects import (
    Block,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Delta,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from bough.server.endpoint import encode_json
from bough.server.errors import Failure, anthropic_shape
from bough.server.parsing import CallIds, StreamParser
from bough.server.streaming import PreparedChunk, named_event

PREFIX = "toolu_"


def whole_blocks(events: Iterable[Event]) -> list[Block]:
    """A finished answer's blocks. There is at least one, be it an empty text."""
    blocks: list[Block] = []
    ids = CallIds(PREFIX)
    arguments: list[str] = []
    begun: CallBegin | None = None
    for event in events:
        match event:
            case Text() | CallFailed() if event.text:
                if blocks and isinstance(blocks[-1], TextBlock):
                    blocks[-1] = TextBlock(text=blocks[-1].text + event.text)
                else:
                    blocks.append(TextBlock(text=event.text))
            case Reasoning():
                if blocks and isinstance(blocks[-1], ThinkingBlock):
                    blocks[-1] = ThinkingBlock(thinking=blocks[-1].thinking + event.text)
                else:
                    blocks.append(ThinkingBlock(thinking=event.text))
            case CallBegin():
                begun, arguments = event, []
            case CallArguments():
                arguments.append(event.text)
            case CallEnd():
                assert begun is not None
                given = msgspec.json.decode("".join(arguments))
                blocks.append(ToolUseBlock(id=ids.name(begun), name=begun.name, input=given))
    return blocks or [TextBlock(text="")]


class BlockWriter:
    """Writes the events of blocks; one block is open at a time."""

    def __init__(self) -> None:
        self._ids = CallIds(PREFIX)
        self._index = -1
        self._open: type[Block] | None = None

    def write(self, event: Event) -> bytes:
        match event:
            case Text() | CallFailed():
                return self._say(TextBlock(text=""), TextDelta(text=event.text)) if event.text else b""
            case Reasoning():
                return self._say(ThinkingBlock(thinking=""), ThinkingDelta(thinking=event.text))
            case CallBegin():
                return self._begin(ToolUseBlock(id=self._ids.name(event), name=event.name, input={}))
            case CallArguments():
                return self._delta(InputJsonDelta(partial_json=event.text))
            case CallEnd():
                return self._end()

    def close(self) -> bytes:
        """After the last event."""
        return self._end() if self._index >= 0 else self._begin(TextBlock(text="")) + self._end()

    def _say(self, block: Block, delta: Delta) -> bytes:
        """More of a block of this kind, which begins if another one is open."""
        opening = b"" if self._open is type(block) else self._begin(block)
        return opening + self._delta(delta)

    def _begin(self, block: Block) -> bytes:
        closing = self._end()
        self._index += 1
        self._open = type(block)
        return closing + named_event(ContentBlockStart(index=self._index, content_block=block))

    def _delta(self, delta: Delta) -> bytes:
        return named_event(ContentBlockDelta(index=self._index, delta=delta))

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta(SignatureDelta(signature="")) if self._open is ThinkingBlock else b""
        self._open = None
        return signed + named_event(ContentBlockStop(index=self._index))


BLOCK_BEGINS = named_event(ContentBlockStart(content_block=TextBlock(text=""))) + named_event(Ping())
BLOCK_ENDS = named_event(ContentBlockStop())
MESSAGE_ENDS = named_event(MessageStop())
TEXT = PreparedChunk(named_event(ContentBlockDelta(delta=TextDelta(text=""))), "text")


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What one call's answer looks like."""

    id: str
    model: str
    timed: bool
    answers: AnswerFormat = field(default_factory=AnswerFormat)

    @property
    def opening_events(self) -> int:
        """How many events of a stream stand before its text: the message's beginning and a ping; plain text also has
        its one block begin there."""
        return 3 if self.answers.plain else 2

    def whole(self, answer: RequestOutput) -> Message:
        """The answer that is not streamed. Plain text is one block, be it empty."""
        content: list[Block] = [TextBlock(text=answer.text)]
        called = False
        if not self.answers.plain:
            parser = AnswerParser(self.answers)
            events: list[Event] = [*parser.feed(answer.text), *parser.finish()]
            content, called = whole_blocks(events), any(isinstance(event, CallEnd) for event in events)
        reason, sequence = stop_of(answer, called=called)
        return Message(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage_of(answer),
            timings=answer.timings.to_dict() if self.timed else UNSET,
        )

    def begun(self, answer: RequestOutput) -> MessageStart:
        """The message of which nothing but its prompt is known."""
        usage = usage_of(answer, output_tokens=0)
        return MessageStart(
            message=Message(id=self.id, model=self.model, content=[], stop_reason=None, stop_sequence=None, usage=usage)
        )

    def ended(self, answer: RequestOutput, *, called: bool = False) -> MessageDelta:
        reason, sequence = stop_of(answer, called=called)
        return MessageDelta(
            delta=StopDelta(stop_reason=reason, stop_sequence=sequence),
            usage=usage_of(answer),
            timings=answer.timings.to_dict() if self.timed else UNSET,
        )


class MessageWriter:
    """Writes one call's stream."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._begun = False
        self._blocks = BlockWriter()
        self._parser = None if form.answers.plain else StreamParser(form.answers)

    def chunk(self, piece: Piece) -> bytes:
        """The events for a piece; with the first and the last one, what stands around the text."""
        if self._parser is not None:
            return self._parsed_chunk(piece, self._parser)
        text = TEXT.fill(piece.text, []) if piece.text else b""
        self._begun |= piece.answer.resumed  # by the stream that this one resumes
        if self._begun and piece.finish is None:
            return text
        closing = b""
        if piece.finish is not None:
            closing = BLOCK_ENDS + named_event(self._form.ended(piece.answer)) + MESSAGE_ENDS
        opening = b"" if self._begun else named_event(self._form.begun(piece.answer)) + BLOCK_BEGINS
        self._begun = True
        return opening + text + closing

    def _parsed_chunk(self, piece: Piece, parser: StreamParser) -> bytes:
        if not self._begun and piece.answer.resumed:
            self._begun = True
            for past in parser.replay(piece.answer.resumed_text):
                self._blocks.write(past)
        opening = b"" if self._begun else named_event(self._form.begun(piece.answer)) + named_event(Ping())
        self._begun = True
        news = b"".join(map(self._blocks.write, parser.events(piece)))
        if piece.finish is None:
            return opening + news
        ended = named_event(self._form.ended(piece.answer, called=parser.called))
        return opening + news + self._blocks.close() + ended + MESSAGE_ENDS

    def end(self) -> bytes:
        return b""  # everything was sent with the last piece


def broken_stream(failure: Failure) -> bytes:
    """The last event of a stream that cannot go on."""
    return b"event: error\ndata: %b\n\n" % encode_json(anthropic_shape(failure))


def stop_of(answer: RequestOutput, *, called: bool = False) -> tuple[StopReason, str | None]:
    """Why the answer ended, and at which of the client's stop sequences; `called`: it has calls. An aborted one is
    none: it raises."""
    raise_if_refused(answer)
    match answer.finish:
        case FinishStop(matched=str(sequence)):
            return "stop_sequence", sequence
        case FinishLength():
            return "max_tokens", None
        case FinishAbort():
            raise RequestError("The request was aborted.", status_code=499, err_type="AbortError")
    return "tool_use" if called else "end_turn", None


def usage_of(answer: RequestOutput, output_tokens: int | None = None) -> Usage:
    return Usage(
        input_tokens=answer.prompt_tokens - answer.cached_tokens,
        cache_read_input_tokens=answer.cached_tokens,
        output_tokens=len(answer.ids) if output_tokens is None else output_tokens,
    )
