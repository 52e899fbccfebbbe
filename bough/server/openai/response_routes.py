"""The routes of /v1/responses: create (whole, streamed or in the background), fetch and cancel.

The store is bounded and in memory: the oldest finished responses go first. Processes on one port do not share it, so
with several tokenizer workers nothing is stored, and requests that need the store get an error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from bough.client.outputs import RequestOutput
from bough.core.errors import RequestError
from bough.core.sampling_params import GRAMMAR_FIELDS
from bough.server.bodies import read_lenient_body
from bough.server.context import ServerContext
from bough.server.endpoint import json_response
from bough.server.errors import HttpError, failure_of
from bough.server.messages import Message, text_size
from bough.server.openai.logprobs import TokenSpeller
from bough.server.openai.requests import Identity, ResponsesRequest, response_tools, use_openai_names
from bough.server.openai.response_items import output_messages, read_input
from bough.server.openai.response_objects import Item, ResponseObject
from bough.server.openai.responses import (
    ResponseForm,
    ResponseWriter,
    read_response_request,
    template_variables,
    text_format,
    with_instructions,
)
from bough.server.parsing import plan_answers
from bough.server.streaming import stream_answers, timing_headers, while_connected

MAX_RESPONSES = 1000
MAX_CHARACTERS = 64 << 20


@dataclass(slots=True)
class Record:
    """One response and the conversation that led to it, its own answer included once there is one."""

    response: ResponseObject
    messages: Sequence[Message]
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def size(self) -> int:
        return text_size(self.messages) + len(self.response.instructions or "")

    def end(self, response: ResponseObject) -> None:
        """Keeps the final form; its output joins the conversation."""
        self.messages = [*self.messages, *output_messages(response.output)]
        self.response = response
        self.ended.set()


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS) -> None:
        self._records: dict[str, Record] = {}
        self._sizes: dict[str, int] = {}  # characters of each record
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
        self._sizes[record.response.id] = record.size
        size = sum(self._sizes.values())
        for id, old in list(self._records.items())[:-1]:
            if len(self._records) <= self._max_responses and size <= self._max_characters:
                return
            if old.ended.is_set():
                size -= self._sizes[id]
                self.forget(id)

    def find(self, id: str) -> Record:
        record = self._records.get(id)
        if record is None:
            raise HttpError(404, f"There is no response {id!r}; it may have been forgotten.", "NotFoundError")
        return record

    def forget(self, id: str) -> None:
        self._records.pop(id, None)
        self._sizes.pop(id, None)

    def __len__(self) -> int:
        return len(self._records)


CANCEL_WAIT_S = 5.0
MAX_BACKGROUND = 1000  # responses at work in the background, which no connection bounds
SEVERAL_PROCESSES = (
    "this server has several tokenizer workers (--tokenizer-worker-num), which do not share responses; "
    "start it with one to store, fetch and continue them."
)


class Responses:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._speller = TokenSpeller(context.tokenizer)
        self._store = ResponseStore() if context.settings.server.tokenizer_worker_num == 1 else None
        self._tasks: set[asyncio.Task[None]] = set()

    async def create(self, request: Request) -> Response:
        body = await read_lenient_body(request, ResponsesRequest)
        if body.background and len(self._tasks) >= MAX_BACKGROUND:
            raise RequestError(
                f"{MAX_BACKGROUND} responses are at work in the background; try again later.",
                status_code=429,
                err_type="QueueFullError",
            )
        conversation = [*self._earlier(body), *read_input(body.input)]
        form = await self._form(body, conversation)
        record = Record(form.begun("queued" if body.background else "in_progress"), conversation)
        if form.stored and self._store is not None:
            self._store.add(record)
        if body.background:
            task = asyncio.create_task(self._run_in_background(form, record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            queued = json_response(record.response)
            await asyncio.sleep(0)  # in its first turn the task submits its request, so that a cancel will find it
            return queued
        if body.stream:
            return self._stream(form, record)
        answer = await while_connected(request, self._run(form, record))
        return json_response(record.response, headers=timing_headers([answer]) if body.return_timings else None)

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

    def _earlier(self, body: ResponsesRequest) -> Sequence[Message]:
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

    async def _form(self, body: ResponsesRequest, conversation: Sequence[Message]) -> ResponseForm:
        for name in ("background", "store"):
            if getattr(body, name) and self._store is None:
                raise RequestError(f"{name}: {SEVERAL_PROCESSES}", field=name)
        identity = Identity.make("resp_", body.rid, self._context.model.name)
        given = read_response_request(body, identity, self._context.model.context_length)
        names = {"input_ids": "input", "messages": "input", "max_new_tokens": "max_output_tokens"}
        names |= {name: "text.format" for name in text_format(body) if name in GRAMMAR_FIELDS}
        use_openai_names(body, **names)
        messages = with_instructions(body.instructions, conversation)
        plan = plan_answers(self._context.settings, response_tools(body), self._context.tokenizer)
        prompt = await self._context.render(
            messages, field="input", tools=plan.tools.shown, variables=template_variables(body)
        )
        inputs, answers = await self._context.plan_inputs(plan, prompt, given, budget=body.max_thinking_tokens)
        stored = self._store is not None and body.store is not False
        return ResponseForm(body, identity, inputs, self._speller, stored, answers)

    def _find(self, request: Request) -> Record:
        if self._store is None:
            raise HttpError(404, f"No response is stored: {SEVERAL_PROCESSES}", "NotFoundError")
        return self._store.find(request.path_params["id"])

    async def _run(self, form: ResponseForm, record: Record) -> RequestOutput:
        """Makes the whole response. A request that is refused leaves no record; its client gets the error."""
        try:
            (answer,) = await self._context.client.answers(form.inputs)
            record.end(form.ended(answer))
        finally:
            self._settle(form, record)
        return answer

    async def _run_in_background(self, form: ResponseForm, record: Record) -> None:
        """No client waits, so the record keeps success and failure alike."""
        record.response = form.begun("in_progress")
        try:
            (answer,) = await self._context.client.answers(form.inputs)
            record.end(form.ended(answer))
        except Exception as error:  # noqa: BLE001  (failure_of logs defects)
            record.end(form.failed(failure_of(error)))
        if self._store is not None:
            self._store.update(record)

    def _stream(self, form: ResponseForm, record: Record) -> Response:
        def keep(answer: RequestOutput, items: Sequence[Item]) -> ResponseObject:
            record.end(form.ended(answer, items))
            return record.response

        writer = ResponseWriter(form, keep)
        return stream_answers(
            self._context.client,
            form.inputs,
            writer,
            writer.failure,
            timed=bool(form.request.return_timings),
            on_close=lambda: self._settle(form, record),
        )

    def _settle(self, form: ResponseForm, record: Record) -> None:
        """After success, failure or a disconnect: no record of an ended request stays open."""
        if not record.ended.is_set():
            record.end(form.begun("cancelled"))  # its client has left
            if self._store is not None:
                self._store.forget(form.identity.id)
        elif self._store is not None:
            self._store.update(record)
