"""/v1/responses: from request to inputs, and from an answer to a response. Pure apart from the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from bough.client.answer import Answer
from bough.client.inputs import Inputs
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength
from bough.server.errors import Failure
from bough.server.grammars import format_fields, grammar_of
from bough.server.messages import Message, read_messages
from bough.server.openai.limits import check_request
from bough.server.openai.logprobs import TokenSpeller, chat_logprobs
from bough.server.openai.objects import TokenLogprob
from bough.server.openai.reading import Identity, options_of, sampling_of
from bough.server.openai.response_objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from bough.server.openai.schema import ResponsesRequest
from bough.server.openai.usage import warnings_of

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
    if fields and grammar_of(request):
        raise RequestError(
            f"text.format and {', '.join(grammar_of(request))} each say what the answer must match; give one of them.",
            field="text.format",
        )
    return fields


def wants_logprobs(request: ResponsesRequest) -> bool:
    return bool(request.top_logprobs) or INCLUDE_LOGPROBS in (request.include or ())


def read_input(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """The new turns of the conversation."""
    if isinstance(given, str):
        return read_messages([{"role": "user", "content": given}], "input")
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        if kind != "message":
            raise RequestError(
                f"input[{i}]: items of type {kind!r} are not supported by this server; send messages only.",
                field=f"input[{i}]",
            )
    turns = read_messages(given, "input")
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


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

    @property
    def message_id(self) -> str:
        return f"msg_{self.identity.id.removeprefix('resp_')}"

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
            user=request.user,
        )

    def ended(self, answer: Answer) -> ResponseObject:
        """With its answer, complete or not."""
        status = _status(answer)
        cut = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        return msgspec.structs.replace(
            self.begun(status),
            output=[self.message(answer)],
            usage=_usage(answer),
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

    def message(self, answer: Answer) -> OutputMessage:
        whole = _status(answer) == "completed"
        return OutputMessage(
            id=self.message_id, status="completed" if whole else "incomplete", content=[self.part(answer)]
        )

    def part(self, answer: Answer) -> OutputText:
        """The text of a finished answer."""
        return OutputText(
            text=answer.text,
            logprobs=self.logprobs(answer, 0, len(answer.ids)) if wants_logprobs(self.request) else None,
            token_ids=answer.ids if self.request.return_token_ids else UNSET,
        )

    def logprobs(self, answer: Answer, start: int, end: int) -> list[TokenLogprob]:
        if not wants_logprobs(self.request):
            return []
        return chat_logprobs(answer.output_logprobs, start, end, self.speller)


def _status(answer: Answer) -> Status:
    match answer.finish:
        case FinishLength():
            return "incomplete"
        case FinishAbort():
            return "cancelled"
    return "completed"


def _usage(answer: Answer) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=answer.prompt_tokens,
        input_tokens_details=InputTokensDetails(answer.cached_tokens, 0),
        output_tokens=len(answer.ids),
        output_tokens_details=OutputTokensDetails(0),
        total_tokens=answer.prompt_tokens + len(answer.ids),
    )
