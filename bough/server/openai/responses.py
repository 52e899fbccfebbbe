"""/v1/responses: from request to inputs, from an answer to a response, and the events of its stream in OpenAI's order
(created, item and part added, text, and all of it done again)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from bough.server.errors import Failure
from bough.server.grammars import format_fields, meant
from bough.server.messages import Message, read_messages
from bough.server.openai.logprobs import TokenSpeller, chat_logprobs
from bough.server.openai.objects import TokenLogprob
from bough.server.openai.requests import Identity, ResponsesRequest, check_request, options_of, sampling_of
from bough.server.openai.response_items import ItemWriter, StreamEvent
from bough.server.openai.response_objects import (
    IncompleteDetails,
    InputTokensDetails,
    Item,
    ItemStatus,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from bough.server.openai.writing import warnings_of
from bough.server.parsing import StreamParser
from bough.server.streaming import named_event

INCLUDE_LOGPROBS = "message.output_text.logprobs"
TEXT_FORMAT = {"type": "text"}


def read_response_request(request: ResponsesRequest, identity: Identity, context_length: int) -> dict[str, Any]:
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
    request: ResponsesRequest
    identity: Identity
    inputs: Inputs
    speller: TokenSpeller
    stored: bool
    answers: AnswerFormat = field(default_factory=AnswerFormat)

    @property
    def id_suffix(self) -> str:
        """What the ids of this response's items have in common."""
        return self.identity.id.removeprefix("resp_")

    def begun(self, status: Status) -> ResponseObject:
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

    def failed(self, failure: Failure) -> ResponseObject:
        code = "rate_limit_exceeded" if failure.status == 429 else "invalid_prompt"
        error = ResponseError("server_error" if failure.status >= 500 else code, failure.message)
        return msgspec.structs.replace(self.begun("failed"), error=error)

    def items(self, answer: RequestOutput) -> list[Item]:
        parser, writer = AnswerParser(self.answers), ItemWriter(self.id_suffix)
        for event in [*parser.feed(answer.text), *parser.finish()]:
            writer.write(event)
        writer.close(*self.ending(answer))
        return [item for item in writer.items if item not in writer.failed]

    def ending(self, answer: RequestOutput) -> tuple[ItemStatus, OutputText | None]:
        """What the last item of a finished answer shows; its text, if the answer is nothing else."""
        status: ItemStatus = "completed" if _status(answer) == "completed" else "incomplete"
        if not self.answers.plain:
            return status, None
        shown = wants_logprobs(self.request)
        return status, OutputText(
            text=answer.text,
            logprobs=self.logprobs(answer, 0, len(answer.ids)) if shown else None,
            token_ids=answer.ids if self.request.return_token_ids else UNSET,
        )

    def _thought(self, item: Item) -> int:
        return self.speller.count(item.content[0].text) if isinstance(item, ReasoningItem) and item.content else 0

    def logprobs(self, answer: RequestOutput, start: int, end: int) -> list[TokenLogprob]:
        if not wants_logprobs(self.request):
            return []
        return chat_logprobs(answer.output_logprobs, start, end, self.speller)


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


class ResponseWriter:
    def __init__(
        self, form: ResponseForm, keep: Callable[[RequestOutput, Sequence[Item]], ResponseObject] | None = None
    ) -> None:
        """`keep` makes the response of the whole answer and its items, before the last event shows it."""
        self._form = form
        self._keep = keep or form.ended
        self._answer: RequestOutput | None = None
        self._parser = StreamParser(form.answers)
        self._items = ItemWriter(form.id_suffix)

    def chunk(self, piece: Piece) -> bytes:
        if piece.finish is not None:
            raise_if_refused(piece.answer)
            self._answer = piece.answer
        events = [] if self._items.events else self._opening()
        if not self._form.answers.plain:
            events += [shown for event in self._parser.events(piece) for shown in self._items.write(event)]
        elif piece.text or piece.ids:
            end = piece.first + len(piece.ids)
            events += self._items.say(piece.text, logprobs=self._form.logprobs(piece.answer, piece.first, end))
        return b"".join(map(named_event, events))

    def end(self) -> bytes:
        assert self._answer is not None
        last = self._items.close(*self._form.ending(self._answer))
        response = self._keep(self._answer, self._items.items)
        # OpenAI has no event for a cancelled response: it is one that is not complete.
        kind = "completed" if response.status == "completed" else "incomplete"
        return b"".join(map(named_event, [*last, self._items.event(kind, response=response)]))

    def failure(self, failure: Failure) -> bytes:
        return named_event(self._items.event("failed", response=self._form.failed(failure)))

    def _opening(self) -> list[StreamEvent]:
        response = self._form.begun("in_progress")
        life = [self._items.event(kind, response=response) for kind in ("created", "in_progress")]
        return [*life, *self._items.begin_text()] if self._form.answers.plain else life
