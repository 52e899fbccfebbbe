"""The events of a streamed response, in OpenAI's order: created, item and part added, text, and all of it done again.

Text comes with every token, so its event is made of prepared bytes; the others come once. The items of answers that go
through parsers are `response_items`' matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bough.client.answer import Answer
from bough.client.handle import raise_if_refused
from bough.client.piece import Piece
from bough.server.errors import Failure
from bough.server.openai.response_items import ItemWriter
from bough.server.openai.response_objects import (
    Item,
    ItemEvent,
    LifeEvent,
    OutputMessage,
    OutputText,
    PartEvent,
    ResponseObject,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
)
from bough.server.openai.responses import ResponseForm, item_status, wants_logprobs
from bough.server.parsing import AnswerTrack
from bough.server.responses import encode_json
from bough.server.streaming import named_event

DELTA = "response.output_text.delta"
# The items are those that were shown, where there are parsers.
Keep = Callable[[Answer, Sequence[Item] | None], ResponseObject]


class ResponseWriter:
    """Writes one response's stream; counts its events."""

    def __init__(self, form: ResponseForm, keep: Keep | None = None) -> None:
        """`keep` makes the response of the whole answer, before its last events tell of it."""
        self._form = form
        self._keep = keep or form.ended
        self._answer: Answer | None = None
        self._number = 0
        self._track = None if form.answers.plain else AnswerTrack(form.answers)
        self._items = ItemWriter(form.id_suffix, self._next)
        self._fast = not wants_logprobs(form.request)
        # The text and the number are the only parts that change.
        empty = named_event(TextDeltaEvent(DELTA, form.message_id, 0, 0, "", [], 0))
        before, _, after = empty.partition(b'"delta":""')
        self._before_text = before + b'"delta":'
        self._after_text = after.removesuffix(b"0}\n\n")

    def chunk(self, piece: Piece) -> bytes:
        """The events for a piece, up to the last text."""
        if piece.finish is not None:
            raise_if_refused(piece.answer)
            self._answer = piece.answer
        opening = b"" if self._number else b"".join(map(named_event, self._opening()))
        if self._track is not None:
            events = [shown for event in self._track.events(piece) for shown in self._items.write(event)]
            return opening + b"".join(map(named_event, events))
        if not piece.text and not piece.ids:
            return opening
        if not self._fast:
            return opening + named_event(self.delta(piece))
        number = b"%d}\n\n" % self._next()
        return b"".join((opening, self._before_text, encode_json(piece.text), self._after_text, number))

    def delta(self, piece: Piece) -> TextDeltaEvent:
        """The event for new text, through the schema."""
        logprobs = self._form.logprobs(piece.answer, piece.first, piece.first + len(piece.ids))
        return TextDeltaEvent(DELTA, self._form.message_id, 0, 0, piece.text, logprobs, self._next())

    def end(self) -> bytes:
        """After the last piece."""
        assert self._answer is not None
        if self._track is None:
            return b"".join(map(named_event, self._closing(self._answer, self._keep(self._answer, None))))
        last = list(self._items.close(item_status(self._answer)))
        return b"".join(map(named_event, [*last, self._life(self._keep(self._answer, self._items.items))]))

    def failure(self, failure: Failure) -> bytes:
        """The last event of a stream that cannot go on."""
        return named_event(LifeEvent("response.failed", self._form.failed(failure), self._next()))

    def _opening(self) -> Iterator[StreamEvent]:
        form = self._form
        response = form.begun("in_progress")
        yield LifeEvent("response.created", response, self._next())
        yield LifeEvent("response.in_progress", response, self._next())
        if self._track is not None:
            return
        item = OutputMessage(id=form.message_id, status="in_progress", content=[])
        yield ItemEvent("response.output_item.added", 0, item, self._next())
        part = OutputText(text="")
        yield PartEvent("response.content_part.added", form.message_id, 0, 0, part, self._next())

    def _closing(self, answer: Answer, response: ResponseObject) -> Iterator[StreamEvent]:
        form = self._form
        part = form.part(answer)
        done = TextDoneEvent(
            "response.output_text.done", form.message_id, 0, 0, part.text, part.logprobs or [], self._next()
        )
        yield done
        yield PartEvent("response.content_part.done", form.message_id, 0, 0, part, self._next())
        yield ItemEvent("response.output_item.done", 0, form.message(answer), self._next())
        yield self._life(response)

    def _life(self, response: ResponseObject) -> LifeEvent:
        """OpenAI has no event for a cancelled response: it is one that is not complete."""
        kind = "response.completed" if response.status == "completed" else "response.incomplete"
        return LifeEvent(kind, response, self._next())

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number
