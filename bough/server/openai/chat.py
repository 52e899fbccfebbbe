"""/v1/chat/completions: the handler, from request to inputs, and from pieces to messages and deltas."""

from collections.abc import Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from bough.client.outputs import Piece, RequestOutput
from bough.core.errors import RequestError
from bough.parsers import AnswerFormat, CallArguments, CallBegin, CallEnd, CallFailed, Event, Reasoning, Text
from bough.server.context import Rendered, ServerContext, offload
from bough.server.messages import read_messages
from bough.server.openai import objects, requests
from bough.server.openai.requests import ChatRequest, Identity
from bough.server.openai.writing import AnswerWriter, TokenSpeller, chat_logprobs, whole_piece
from bough.server.parsing import CallIds, StreamParser, plan_answers
from bough.server.streaming import PreparedChunk, json_event, read_resumption, respond


def read_chat(request: ChatRequest, identity: Identity, context_length: int) -> dict[str, Any]:
    requests.check_request(request)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", field="top_logprobs")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return {
        **requests.options_of(request, identity),
        # Without a limit an answer may use all that is left of the context; the scheduler knows how much that is.
        "sampling_params": requests.sampling_of(
            request, max_new_tokens=context_length if limit is None else limit, samples=request.n or 1
        ),
        "overlong": "none" if limit is None else "refused",
        **requests.logprobs_of(request, top_of(request)),
        **read_resumption(request.resume, request.stream),
    }


def top_of(request: ChatRequest) -> int | None:
    """How many of the likeliest tokens are shown beside each; None: there are no logprobs."""
    return (request.top_logprobs or 0) if request.logprobs else None


def template_variables(request: ChatRequest) -> dict[str, Any]:
    effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    return {**effort, **(request.chat_template_kwargs or {})}


def delta_of(event: Event, ids: CallIds) -> objects.ChatDelta | None:
    """What an event adds to a message. A failed call is sent as text, too."""
    match event:
        case Text() | CallFailed():
            return objects.ChatDelta(content=event.text)
        case Reasoning():
            return objects.ChatDelta(reasoning_content=event.text)
        case CallBegin():
            function = objects.FunctionDelta(name=event.name, arguments="")
            begun = objects.ToolCallDelta(index=event.index, id=ids.name(event), type="function", function=function)
            return objects.ChatDelta(tool_calls=[begun])
        case CallArguments():
            more = objects.ToolCallDelta(index=event.index, function=objects.FunctionDelta(arguments=event.text))
            return objects.ChatDelta(tool_calls=[more])
        case CallEnd():
            return None


class ChatWriter(AnswerWriter):
    """A stream has for each answer a chunk with the role (unless a broken stream has shown it, which this one resumes),
    its text, and a chunk with its finish reason. The first two and the last two are sent together."""

    whole_type, chunk_type = objects.ChatCompletion, objects.ChatChunk
    opening_events = 1

    def __init__(
        self, request: ChatRequest, identity: Identity, speller: TokenSpeller, form: AnswerFormat | None = None
    ) -> None:
        super().__init__(request, identity, speller, logprobs=top_of(request), samples=request.n or 1)
        self._form = form or AnswerFormat()
        self._prepared: dict[int, dict[type[Event], PreparedChunk]] = {}  # by answer, for text and for thinking
        self._parsers: dict[int, StreamParser] = {}

    def _choices(self, answers: list[RequestOutput]) -> list[objects.ChatChoice]:
        messages = [self._message(answer) for answer in answers]
        return [
            objects.ChatChoice(
                index=answer.index,
                message=message,
                logprobs=self._logprobs(whole_piece(answer)),
                token_ids=self._shown_ids(answer.ids),
                **self._ending(answer, called=bool(message.tool_calls)),
            )
            for answer, message in zip(answers, messages, strict=True)
        ]

    def _more(self, answers: list[RequestOutput]) -> dict[str, Any]:
        return {"prompt_logprobs": self._prompt_logprobs(answers[0])}

    def _message(self, answer: RequestOutput) -> objects.ChatMessage:
        """A finished answer's text, thinking and calls; the text is null where there is only one of the others."""
        if self._form.plain:
            return objects.ChatMessage(content=answer.text)
        parsed, ids = self._form.parse(answer.text), CallIds()
        calls = [
            objects.ToolCall(id=ids.name(call), function=objects.CalledFunction(call.name, call.arguments))
            for call in parsed.calls
        ]
        empty = not parsed.text and (parsed.calls or parsed.reasoning)
        return objects.ChatMessage(
            content=None if empty else parsed.text, reasoning_content=parsed.reasoning or None, tool_calls=calls or None
        )

    def _logprobs(self, piece: Piece) -> objects.ChatLogprobs | None:
        if self._top is None:
            return None
        shown = chat_logprobs(piece.answer.output_logprobs, *piece.logprob_span, self._speller, self._top)
        return objects.ChatLogprobs(shown)

    def _quick(self, piece: Piece) -> bytes:
        prepared, parser = self._prepared[piece.index], self._parsers[piece.index]
        if self._form.plain:
            return prepared[Text].fill(piece.text, piece.ids)
        events = parser.events(piece)
        if len(events) == 1 and isinstance(events[0], Text | Reasoning):
            return prepared[type(events[0])].fill(events[0].text, piece.ids)
        return b"".join(map(json_event, self._parsed(piece, parser, events)))

    def full_chunks(self, piece: Piece) -> list[objects.ChatChunk]:
        answer, chunks = piece.answer, []
        if piece.index not in self._answers:
            self._begin(piece)
            if not answer.resumed:
                chunks.append(self._delta(piece, objects.ChatDelta(role="assistant", content="")))
        parser = self._parsers[piece.index]
        if not self._form.plain:
            chunks += self._parsed(piece, parser, parser.events(piece))
        elif piece.text or piece.ids:
            chunks.append(self._delta(piece, objects.ChatDelta(content=piece.text), **self._token_fields(piece)))
        if piece.finish is not None:
            chunks.append(self._delta(piece, objects.ChatDelta(), **self._ending(answer, called=parser.called)))
        return chunks

    def _parsed(self, piece: Piece, parser: StreamParser, events: Sequence[Event]) -> list[objects.ChatChunk]:
        """The chunks for what a parser makes of a piece. What is shown of its tokens goes with the first of them; where
        the text is held back, that gets a chunk of its own."""
        deltas = [delta for event in events if (delta := delta_of(event, parser.ids)) is not None]
        if not deltas and piece.ids and (self._top is not None or self._request.return_token_ids):
            deltas = [objects.ChatDelta(content="")]
        first = [self._delta(piece, delta, **self._token_fields(piece)) for delta in deltas[:1]]
        return first + [self._delta(piece, delta) for delta in deltas[1:]]

    def _token_fields(self, piece: Piece) -> dict[str, Any]:
        return {"logprobs": self._logprobs(piece), "token_ids": self._shown_ids(piece.ids)}

    def _reasoning_tokens(self, choices: Sequence[objects.ChatChoice] = ()) -> int:
        whole = (choice.message.reasoning_content or "" for choice in choices)
        return sum(map(self._speller.count, [*whole, *(parser.reasoning for parser in self._parsers.values())]))

    def _begin(self, piece: Piece) -> None:
        self._answers[piece.index] = piece.answer
        parser = self._parsers[piece.index] = StreamParser(self._form)
        for past in parser.replay(piece.answer.resumed_text):
            delta_of(past, parser.ids)  # reserves the ids of its calls
        self._prepared[piece.index] = {
            Text: self._prepared_delta(piece, objects.ChatDelta(content=""), "content"),
            Reasoning: self._prepared_delta(piece, objects.ChatDelta(reasoning_content=""), "reasoning_content"),
        }

    def _prepared_delta(self, piece: Piece, delta: objects.ChatDelta, text_field: str) -> PreparedChunk:
        choice = objects.ChatChunkChoice(index=piece.index, delta=delta, token_ids=self._shown_ids([]))
        return self._prepare(choice, text_field)

    def _delta(self, piece: Piece, delta: objects.ChatDelta, **fields: Any) -> objects.ChatChunk:
        choice = objects.ChatChunkChoice(index=piece.index, delta=delta, **fields)
        return cast(objects.ChatChunk, self._chunk(piece, choice, last="finish_reason" in fields))


async def chat(context: ServerContext, request: Request, body: ChatRequest) -> Response:
    identity = Identity.make("chatcmpl-", body.rid, context.shown_name(body.model), body.resume)
    requests.use_openai_names(
        body,
        input_ids="input_ids" if body.input_ids is not None else "messages",
        max_new_tokens="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
    )
    given, budget = read_chat(body, identity, context.model.context_length), body.max_thinking_tokens
    shown = {"separate": body.separate_reasoning is not False, "stream_reasoning": body.stream_reasoning is not False}
    plan = plan_answers(context.settings, requests.tools_of(body), context.tokenizer, **shown)
    if body.input_ids is not None:
        inputs, form = await context.plan_inputs(plan, Rendered(body.input_ids, ""), given, budget=budget)
    else:
        inputs, form = await context.converse(
            plan,
            await offload(0, lambda: read_messages(body.messages)),
            given,
            variables=template_variables(body),
            add_generation_prompt=body.add_generation_prompt,
            continued=bool(body.continue_final_message),
            budget=budget,
        )
    writer = ChatWriter(body, identity, TokenSpeller(context.tokenizer), form)
    return await respond(context.client, request, inputs, writer, stream=body.stream)
