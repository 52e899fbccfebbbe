"""/v1/responses: create (whole, streamed or in the background), fetch and cancel.

A stream has OpenAI's order of events: created, item and part added, text, and all of it done again. The store is
bounded and in memory: the oldest finished responses go first. Processes on one port do not share it, so with several
tokenizer workers nothing is stored, and requests that need the store get an error.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from bough.client.inputs import Inputs
from bough.client.outputs import Piece, RequestOutput
from bough.core.errors import RequestError
from bough.core.sampling_params import GRAMMAR_FIELDS
from bough.parsers import AnswerFormat, AnswerParser
from bough.server.context import ServerContext, offload
from bough.server.endpoint import json_response
from bough.server.errors import Failure, HttpError, failure_of
from bough.server.grammars import format_fields, meant
from bough.server.messages import Message, read_messages, text_size
from bough.server.openai import requests
from bough.server.openai import response_items as items
from bough.server.openai.objects import TokenLogprob
from bough.server.openai.writing import TokenSpeller, chat_logprobs
from bough.server.parsing import StreamParser, plan_answers
from bough.server.streaming import Writer, named_event, respond, stream_answers, warnings_of

INCLUDE_LOGPROBS = "message.output_text.logprobs"
TEXT_FORMAT = {"type": "text"}
MAX_RESPONSES = 1000
MAX_CHARACTERS = 64 << 20
CANCEL_WAIT_S = 5.0
MAX_BACKGROUND = 1000  # responses at work in the background, which no connection bounds
SEVERAL_PROCESSES = (
    "this server has several tokenizer workers (--tokenizer-worker-num), which do not share responses; "
    "start it with one to store, fetch and continue them."
)


def read_response_request(
    request: requests.ResponsesRequest, identity: requests.Identity, context_length: int
) -> dict[str, Any]:
    requests.check_request(request)
    if request.background and request.stream:
        raise RequestError("background and stream exclude each other; set only one of them.", field="background")
    if request.background and request.store is False:
        raise RequestError("A response in the background must be stored; leave store out.", field="store")
    limit = request.max_output_tokens
    return {
        **requests.options_of(request, identity),
        "sampling_params": {
            **requests.sampling_of(request, max_new_tokens=context_length if limit is None else limit),
            **text_format(request),
        },
        "overlong": "none" if limit is None else "refused",
        "return_logprob": wants_logprobs(request),
        "top_logprobs_num": request.top_logprobs or 0,
    }


def text_format(request: requests.ResponsesRequest) -> dict[str, Any]:
    """The sampling fields of `text.format`, this API's name for a response format."""
    given = (request.text or {}).get("format")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError("text.format must be an object.", field="text.format")
    fields = format_fields(given, "text.format")
    others = dict.fromkeys(theirs for _, theirs in meant(request).values())
    if fields and others:
        text = f"text.format and {' and '.join(others)} each say what the answer must match; give one of them."
        raise RequestError(text, field="text.format")
    return fields


def wants_logprobs(request: requests.ResponsesRequest) -> bool:
    return bool(request.top_logprobs) or INCLUDE_LOGPROBS in (request.include or ())


def with_instructions(instructions: str | None, conversation: Sequence[Message]) -> list[Message]:
    """Instructions hold for one response; they are not part of what is continued."""
    own = [{"role": "system", "content": instructions}] if instructions else []
    return [*read_messages(own, "instructions"), *conversation] if own else list(conversation)


def template_variables(request: requests.ResponsesRequest) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    effort = (request.reasoning or {}).get("effort")
    return variables if effort is None else {"reasoning_effort": effort, **variables}


class ResponseWriter(Writer):
    def __init__(
        self,
        request: requests.ResponsesRequest,
        identity: requests.Identity,
        inputs: Inputs,
        speller: TokenSpeller,
        *,
        stored: bool,
        form: AnswerFormat | None = None,
    ) -> None:
        self.timed = request.return_timings
        self.request = request
        self.identity = identity
        self.inputs = inputs
        self.stored = stored
        # Gets the response before its client.
        self.on_end: Callable[[items.ResponseObject], None] = lambda response: None
        self._speller = speller
        self._form = form or AnswerFormat()
        self._answer: RequestOutput | None = None
        self._parser = StreamParser(self._form)
        self._id_suffix = identity.id.removeprefix("resp_")  # which the ids of its items have in common
        self._items = items.ItemWriter(self._id_suffix)

    def begun(self, status: items.Status) -> items.ResponseObject:
        request, sampling = self.request, self.inputs.prompts[0].sampling
        return items.ResponseObject(
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

    def whole(self, answers: list[RequestOutput]) -> items.ResponseObject:
        (answer,) = answers
        parser, writer = AnswerParser(self._form), items.ItemWriter(self._id_suffix)
        for event in [*parser.feed(answer.text), *parser.finish()]:
            writer.write(event)
        writer.close(*self._ending(answer))
        return self._ended(answer, [item for item in writer.items if item not in writer.failed])

    def _ended(self, answer: RequestOutput, output: list[items.Item]) -> items.ResponseObject:
        """With its answer, complete or not."""
        status = _status(answer)
        cut = items.IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        response = msgspec.structs.replace(
            self.begun(status),
            output=output,
            usage=_usage(answer, sum(self._thought(item) for item in output)),
            incomplete_details=cut,
            meta_info=answer.meta_info() if self.request.return_meta_info else UNSET,
            timings=answer.timings if self.timed else UNSET,
            warnings=warnings_of([answer]),
        )
        self.on_end(response)
        return response

    def failed(self, failure: Failure) -> items.ResponseObject:
        code = "rate_limit_exceeded" if failure.status == 429 else "invalid_prompt"
        error = items.ResponseError("server_error" if failure.status >= 500 else code, failure.message)
        return msgspec.structs.replace(self.begun("failed"), error=error)

    def _ending(self, answer: RequestOutput) -> tuple[items.ItemStatus, items.OutputText | None]:
        """What the last item of a finished answer shows; its text, if the answer is nothing else."""
        status: items.ItemStatus = "completed" if _status(answer) == "completed" else "incomplete"
        if not self._form.plain:
            return status, None
        shown = wants_logprobs(self.request)
        return status, items.OutputText(
            text=answer.text,
            logprobs=self._logprobs(answer, 0, len(answer.ids)) if shown else None,
            token_ids=answer.ids if self.request.return_token_ids else UNSET,
        )

    def _thought(self, item: items.Item) -> int:
        thoughts = item.content if isinstance(item, items.ReasoningItem) else []
        return self._speller.count(thoughts[0].text) if thoughts else 0

    def _logprobs(self, answer: RequestOutput, start: int, end: int) -> list[TokenLogprob]:
        if not wants_logprobs(self.request):
            return []
        return chat_logprobs(answer.output_logprobs, start, end, self._speller)

    def chunk(self, piece: Piece) -> bytes:
        if piece.finish is not None:
            self._answer = piece.answer
        events = [] if self._items.events else self._opening()
        if not self._form.plain:
            events += [shown for event in self._parser.events(piece) for shown in self._items.write(event)]
        elif piece.text or piece.ids:
            end = piece.first + len(piece.ids)
            events += self._items.say(piece.text, logprobs=self._logprobs(piece.answer, piece.first, end))
        return b"".join(map(named_event, events))

    def end(self) -> bytes:
        assert self._answer is not None
        last = self._items.close(*self._ending(self._answer))
        response = self._ended(self._answer, list(self._items.items))
        # OpenAI has no event for a cancelled response: it is one that is not complete.
        kind = "completed" if response.status == "completed" else "incomplete"
        return b"".join(map(named_event, [*last, self._items.event(kind, response=response)]))

    def failure(self, failure: Failure) -> bytes:
        return named_event(self._items.event("failed", response=self.failed(failure)))

    def _opening(self) -> list[items.StreamEvent]:
        response = self.begun("in_progress")
        life = [self._items.event(kind, response=response) for kind in ("created", "in_progress")]
        return [*life, *self._items.begin_text()] if self._form.plain else life


STATUS: dict[str, items.Status] = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}


def _status(answer: RequestOutput) -> items.Status:
    assert answer.finish is not None
    return STATUS[answer.finish.kind]


def _usage(answer: RequestOutput, reasoning: int) -> items.ResponseUsage:
    return items.ResponseUsage(
        input_tokens=answer.prompt_tokens,
        input_tokens_details=items.InputTokensDetails(answer.cached_tokens, 0),
        output_tokens=len(answer.ids),
        output_tokens_details=items.OutputTokensDetails(min(reasoning, len(answer.ids))),
        total_tokens=answer.prompt_tokens + len(answer.ids),
    )


@dataclass(slots=True)
class Record:
    """One response and the conversation that led to it, its own answer included once there is one."""

    response: items.ResponseObject
    messages: Sequence[Message]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    size: int = 0  # characters, as far as the store knows

    def end(self, response: items.ResponseObject) -> None:
        """Keeps the final form; its output joins the conversation."""
        self.messages = [*self.messages, *items.output_messages(response.output)]
        self.response = response
        self.ended.set()


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS) -> None:
        self._records: dict[str, Record] = {}
        self._max_responses = max_responses
        self._max_characters = max_characters

    def add(self, record: Record) -> None:
        """Remembers a response. Its id may be that of an ended one, which it replaces."""
        id = record.response.id
        earlier = self._records.get(id)
        if earlier is not None and not earlier.ended.is_set():
            raise RequestError(f"rid {id!r} is in use by another response; choose another.", field="rid")
        self.forget(id)
        self._records[id] = record
        self.update(record)

    def update(self, record: Record) -> None:
        """A response has grown; one that is not stored, or was replaced, does not matter. Forgets the oldest finished
        responses until the rest fits; the newest stays, however large it is."""
        if self._records.get(record.response.id) is not record:
            return
        record.size = text_size(record.messages) + len(record.response.instructions or "")
        size = sum(each.size for each in self._records.values())
        for id, old in list(self._records.items())[:-1]:
            if len(self._records) <= self._max_responses and size <= self._max_characters:
                return
            if old.ended.is_set():
                size -= old.size
                self.forget(id)

    def find(self, id: str) -> Record:
        record = self._records.get(id)
        if record is None:
            raise HttpError(404, f"There is no response {id!r}; it may have been forgotten.", "NotFoundError")
        return record

    def forget(self, id: str) -> None:
        self._records.pop(id, None)

    def __len__(self) -> int:
        return len(self._records)


class Responses:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._speller = TokenSpeller(context.tokenizer)
        self._store = ResponseStore() if context.settings.server.tokenizer_worker_num == 1 else None
        self._tasks: set[asyncio.Task[None]] = set()

    async def create(self, request: Request, body: requests.ResponsesRequest) -> Response:
        if body.background and len(self._tasks) >= MAX_BACKGROUND:
            text = f"{MAX_BACKGROUND} responses are at work in the background; try again later."
            raise RequestError(text, status_code=429, err_type="QueueFullError")
        conversation = [*self._earlier(body), *(await offload(0, lambda: items.read_input(body.input)))]
        writer = await self._writer(body, conversation)
        record = Record(writer.begun("queued" if body.background else "in_progress"), conversation)
        writer.on_end = record.end
        if writer.stored and self._store is not None:
            self._store.add(record)
        if body.background:
            task = asyncio.create_task(self._run_in_background(writer, record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            queued = json_response(record.response)
            await asyncio.sleep(0)  # in its first turn the task submits its request, so that a cancel will find it
            return queued
        client = self._context.client
        if body.stream:
            return stream_answers(client, writer.inputs, writer, on_close=lambda: self._settle(writer, record))
        try:
            return await respond(client, request, writer.inputs, writer, stream=False)
        finally:
            self._settle(writer, record)

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream") in ("true", "1"):
            raise RequestError("A stored response cannot be streamed again; leave stream out.", field="stream")
        return json_response(self._find(request).response)

    async def cancel(self, request: Request) -> Response:
        record = self._find(request)
        if not record.ended.is_set():
            self._context.client.abort(record.response.id)
            # A stream ends when its reader takes the last piece, and that reader may be slow.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_WAIT_S):
                    await record.ended.wait()
        elif record.response.status != "cancelled":
            raise RequestError(f"The response has ended: it is {record.response.status}.")
        return json_response(record.response)

    # ------------------------------------------------------------------------------------------------------------------

    def _earlier(self, body: requests.ResponsesRequest) -> Sequence[Message]:
        if body.previous_response_id is None:
            return ()
        name = "previous_response_id"
        if self._store is None:
            raise RequestError(f"{name}: {SEVERAL_PROCESSES}", field=name)
        try:
            record = self._store.find(body.previous_response_id)
        except HttpError as error:
            raise RequestError(error.failure.message, field=name) from None
        if not record.response.output:
            raise RequestError(f"That response has no output to continue: it is {record.response.status}.", field=name)
        return record.messages

    async def _writer(self, body: requests.ResponsesRequest, conversation: Sequence[Message]) -> ResponseWriter:
        for name in ("background", "store"):
            if getattr(body, name) and self._store is None:
                raise RequestError(f"{name}: {SEVERAL_PROCESSES}", field=name)
        identity = requests.Identity.make("resp_", body.rid, self._context.shown_name(body.model))
        given = read_response_request(body, identity, self._context.model.context_length)
        names = {"input_ids": "input", "messages": "input", "max_new_tokens": "max_output_tokens"}
        names |= {name: "text.format" for name in text_format(body) if name in GRAMMAR_FIELDS}
        requests.use_openai_names(body, **names)
        messages = with_instructions(body.instructions, conversation)
        plan = plan_answers(self._context.settings, requests.tools_of(body, None), self._context.tokenizer)
        how: dict[str, Any] = {"variables": template_variables(body), "budget": body.max_thinking_tokens}
        inputs, form = await self._context.converse(plan, messages, given, field="input", **how)
        stored = self._store is not None and body.store is not False
        return ResponseWriter(body, identity, inputs, self._speller, stored=stored, form=form)

    def _find(self, request: Request) -> Record:
        if self._store is None:
            raise HttpError(404, f"No response is stored: {SEVERAL_PROCESSES}", "NotFoundError")
        return self._store.find(request.path_params["id"])

    async def _run_in_background(self, writer: ResponseWriter, record: Record) -> None:
        """No client waits, so the record keeps success and failure alike."""
        record.response = writer.begun("in_progress")
        try:
            writer.whole(await self._context.client.answers(writer.inputs))
        except Exception as error:  # noqa: BLE001  (failure_of logs defects)
            record.end(writer.failed(failure_of(error)))
        if self._store is not None:
            self._store.update(record)

    def _settle(self, writer: ResponseWriter, record: Record) -> None:
        """After success, failure or a disconnect: no record of an ended request stays open, and one that was refused is
        forgotten, because its client gets the error."""
        if not record.ended.is_set():
            record.end(writer.begun("cancelled"))  # its client has left
            if self._store is not None:
                self._store.forget(writer.identity.id)
        elif self._store is not None:
            self._store.update(record)
