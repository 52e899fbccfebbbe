"""/v1/responses: from request to inputs, from an answer to a response, and the events of its stream in OpenAI's order
(created, item and part added, text, and all of it done again).

Text comes with every token, so its event is made of prepared bytes; the others come once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from bough.client.handle import raise_if_refused
from bough.client.inputs import Inputs
from bough.client.outputs import Piece, RequestOutput
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength
from bough.parsers import AnswerFormat, AnswerParser
from bough.server.endpoint import encode_json
from bough.server.errors import Failure
from bough.server.grammars import format_fields, meant
from bough.server.messages import Message, read_messages
from bough.server.openai.logprobs import TokenSpeller, chat_logprobs
from bough.server.openai.objects import TokenLogprob
from bough.server.openai.requests import Identity, ResponsesRequest, check_request, options_of, sampling_of
from bough.server.openai.response_items import ItemWriter
from bough.server.openai.response_objects import (
    IncompleteDetails,
    InputTokensDetails,
    Item,
    ItemEvent,
    ItemStatus,
    LifeEvent,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningItem,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
)
from bough.server.openai.usage import warnings_of
from bough.server.parsing import StreamParser
from bough.server.streaming import named_event

INCLUDE_LOGPROBS = "message.output_text.logprobs"
TEXT_FORMAT = {"type": "text"}


def read_response_request(request: ResponsesRequest, identity: Identity, context_length: int) -> dict[str, Any]:
    """What `InputReader.read` is to be given, but for the prompt."""
    check_request(request)
    if request.background and request.stream:
        raise RequestError("background and stream exclude each other; set only one of them.", field="background")
    if request.background and request.store is False:
        raise RequestError("A response in the background must be stored; leave store out.", field="store")
    limit = request.max_output_tokens
    return {
        **options_of(request, identity),
        "sampling_params": {
            **sampling_of(request, max_new_tokens=context_length if limit is None else limit),
            **text_format(request),
        },
        "return_logprob": wants_logprobs(request),
        "top_logprobs_num": request.top_logprobs or 0,
    }


def text_format(request: ResponsesRequest) -> dict[str, Any]:
    """The sampling fields of `text.format`, this API's name for a response format."""
    given = (request.text or {}).get("format")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError("text.format must be an object.", field="text.format")
    fields = format_fields(given, "text.format")
    others = dict.fromkeys(theirs for _, theirs in meant(request).values())
    if fields and others:
        raise RequestError(
            f"text.format and {' and '.join(others)} each say what the answer must match; give one of them.",
            field="text.format",
        )
    return fields


def wants_logprobs(request: ResponsesRequest) -> bool:
    return bool(request.top_logprobs) or INCLUDE_LOGPROBS in (request.include or ())


def with_instructions(instructions: str | None, conversation: Sequence[Message]) -> list[Message]:
    """Instructions hold for one response; they are not part of what is continued."""
    own = [{"role": "system", "content": instructions}] if instructions else []
    return [*read_messages(own, "instructions"), *conversation] if own else list(conversation)


def template_variables(request: ResponsesRequest) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    effort = (request.reasoning or {}).get("effort")
    return variables if effort is None else {"reasoning_effort": effort, **variables}


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What one response looks like, at any time of its life."""

    request: ResponsesRequest
    identity: Identity
    inputs: Inputs
    speller: TokenSpeller
    stored: bool
    answers: AnswerFormat = field(default_factory=AnswerFormat)

    @property
    def message_id(self) -> str:
        return f"msg_{self.id_suffix}"

    @property
    def id_suffix(self) -> str:
        """What the ids of this response's items have in common."""
        return self.identity.id.removeprefix("resp_")

    def begun(self, status: Status) -> ResponseObject:
        """Before there is an answer."""
        request, sampling = self.request, self.inputs.prompts[0].sampling
        return ResponseObject(
            id=self.identity.id,
            created_at=self.identity.created,
            status=status,
            background=bool(request.background),
            model=self.identity.model,
            instructions=request.instructions,
            previous_response_id=request.previous_response_id,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            store=self.stored,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_logprobs=request.top_logprobs or 0,
            text={"format": TEXT_FORMAT, **(request.text or {})},
            reasoning={"effort": None, "summary": None, **(request.reasoning or {})},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            user=request.user,
        )

    def ended(self, answer: RequestOutput, items: Sequence[Item] | None = None) -> ResponseObject:
        """With its answer, complete or not; `items` are those that a stream has shown."""
        status = _status(answer)
        output = self.items(answer) if items is None else list(items)
        cut = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        return msgspec.structs.replace(
            self.begun(status),
            output=output,
            usage=_usage(answer, sum(self._thought(item) for item in output)),
            incomplete_details=cut,
            meta_info=answer.meta_info() if self.request.return_meta_info else UNSET,
            timings=answer.timings.to_dict() if self.request.return_timings else UNSET,
            warnings=warnings_of([answer]),
        )

    def cancelled(self) -> ResponseObject:
        """The client has left before there was an answer to keep."""
        return self.begun("cancelled")

    def failed(self, failure: Failure) -> ResponseObject:
        code = "rate_limit_exceeded" if failure.status == 429 else "invalid_prompt"
        error = ResponseError("server_error" if failure.status >= 500 else code, failure.message)
        return msgspec.structs.replace(self.begun("failed"), error=error)

    def items(self, answer: RequestOutput) -> list[Item]:
        """The output of a finished answer."""
        if self.answers.plain:
            return [self.message(answer)]
        parser, writer = AnswerParser(self.answers), ItemWriter(self.id_suffix, lambda: 0)
        for event in [*parser.feed(answer.text), *parser.finish()]:
            list(writer.write(event))
        list(writer.close(item_status(answer)))
        return [item for item in writer.items if item not in writer.failed]

    def message(self, answer: RequestOutput) -> OutputMessage:
        return OutputMessage(id=self.message_id, status=item_status(answer), content=[self.part(answer)])

    def _thought(self, item: Item) -> int:
        """The tokens of an item that are reasoning."""
        return self.speller.count(item.content[0].text) if isinstance(item, ReasoningItem) and item.content else 0

    def part(self, answer: RequestOutput) -> OutputText:
        """The text of a finished answer."""
        return OutputText(
            text=answer.text,
            logprobs=self.logprobs(answer, 0, len(answer.ids)) if wants_logprobs(self.request) else None,
            token_ids=answer.ids if self.request.return_token_ids else UNSET,
        )

    def logprobs(self, answer: RequestOutput, start: int, end: int) -> list[TokenLogprob]:
        if not wants_logprobs(self.request):
            return []
        return chat_logprobs(answer.output_logprobs, start, end, self.speller)


def item_status(answer: RequestOutput) -> ItemStatus:
    """Of the last item of a finished answer."""
    return "completed" if _status(answer) == "completed" else "incomplete"


def _status(answer: RequestOutput) -> Status:
    match answer.finish:
        case FinishLength():
            return "incomplete"
        case FinishAbort():
            return "cancelled"
    return "completed"


def _usage(answer: RequestOutput, reasoning: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=answer.prompt_tokens,
        input_tokens_details=InputTokensDetails(answer.cached_tokens, 0),
        output_tokens=len(answer.ids),
        output_tokens_details=OutputTokensDetails(min(reasoning, len(answer.ids))),
        total_tokens=answer.prompt_tokens + len(answer.ids),
    )


DELTA = "response.output_text.delta"
# The items are those that were shown, where there are parsers.
Keep = Callable[[RequestOutput, Sequence[Item] | None], ResponseObject]


class ResponseWriter:
    """Writes one response's stream; counts its events."""

    def __init__(self, form: ResponseForm, keep: Keep | None = None) -> None:
        """`keep` makes the response of the whole answer, before its last events show it."""
        self._form = form
        self._keep = keep or form.ended
        self._answer: RequestOutput | None = None
        self._number = 0
        self._parser = None if form.answers.plain else StreamParser(form.answers)
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
        if self._parser is not None:
            events = [shown for event in self._parser.events(piece) for shown in self._items.write(event)]
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
        if self._parser is None:
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
        if self._parser is not None:
            return
        item = OutputMessage(id=form.message_id, status="in_progress", content=[])
        yield ItemEvent("response.output_item.added", 0, item, self._next())
        part = OutputText(text="")
        yield PartEvent("response.content_part.added", form.message_id, 0, 0, part, self._next())

    def _closing(self, answer: RequestOutput, response: ResponseObject) -> Iterator[StreamEvent]:
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
