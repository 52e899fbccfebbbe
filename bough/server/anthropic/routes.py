"""Anthropic's endpoints: reads requests, runs them on the engine's client, answers whole or streamed."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from bough.server.anthropic.objects import Message, TokensCount
from bough.server.anthropic.reading import (
    check_request,
    check_thinking,
    goes_on,
    names_of,
    prompt_of,
    read_conversation,
    read_request,
    read_tools,
    thinking_budget,
)
from bough.server.anthropic.schema import CountTokensRequest, MessagesRequest
from bough.server.anthropic.writing import MessageForm, MessageWriter, broken_stream
from bough.server.bodies import read_lenient_body
from bough.server.context import ServerContext, aside
from bough.server.endpoint import ANTHROPIC, EVENTS, Endpoint, json_response
from bough.server.errors import set_field_names
from bough.server.messages import Rendered, text_size
from bough.server.parsing import AnswerPlan, plan_answers
from bough.server.streaming import answer_whole, resumable, stream_answers


def routes(context: ServerContext) -> list[Endpoint]:
    """Every endpoint of Anthropic's API that this server has."""
    api = Anthropic(context)
    return [
        Endpoint(
            "/v1/messages",
            api.messages,
            "Answer a conversation",
            body=MessagesRequest,
            answer=Message,
            other_types=(EVENTS,),
            **ANTHROPIC,
        ),
        Endpoint(
            "/v1/messages/count_tokens",
            api.count_tokens,
            "How many tokens a conversation has",
            body=CountTokensRequest,
            answer=TokensCount,
            **ANTHROPIC,
        ),
    ]


class Anthropic:
    """The handlers."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def messages(self, request: Request) -> Response:
        body = await read_lenient_body(request, MessagesRequest)
        id = (body.resume and body.resume.id) or f"msg_{uuid.uuid4().hex}"
        timed = bool(body.return_timings)
        set_field_names(names_of(body))
        plan = self._plan(body)
        prompt, continued = await self._prompt(body, plan)
        given = read_request(body, id)
        given["sampling_params"] = sampling = plan.sampling(given["sampling_params"])
        given["thinking"] = plan.marks(sampling, prompt.text, continued, thinking_budget(body.thinking))
        inputs = await self._context.read_inputs(input_ids=prompt.ids, **given)
        form = MessageForm(id, self._context.model.name, timed, plan.answers(prompt.text, continued))
        client = self._context.client
        if body.stream:
            writer = resumable(request, inputs, MessageWriter(form), opening_events=form.opening_events)
            return stream_answers(client, inputs, writer, broken_stream, timed=timed)
        return await answer_whole(client, request, inputs, lambda answers: form.whole(*answers), timed=timed)

    async def count_tokens(self, request: Request) -> Response:
        body = await read_lenient_body(request, CountTokensRequest)
        prompt, _ = await self._prompt(body, self._plan(body))
        return json_response(TokensCount(len(prompt.ids)))

    def _plan(self, body: CountTokensRequest) -> AnswerPlan:
        check_request(body)
        check_thinking(body.thinking, self._context.settings)
        return plan_answers(self._context.settings, read_tools(body), self._context.tokenizer)

    async def _prompt(self, body: CountTokensRequest, plan: AnswerPlan) -> tuple[Rendered, str]:
        """The prompt, and the assistant's words that the answer goes on with."""
        turns = read_conversation(body)
        tokenizer = self._context.require_tokenizer("messages")
        prompt = await aside(text_size(turns), lambda: prompt_of(body, turns, tokenizer, plan.tools))
        return prompt, turns[-1]["content"] if goes_on(turns) else ""
