"""Anthropic's protocol: messages, whole and streamed, and the count of their tokens."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.server.anthropic.requests import (
    CountTokensRequest,
    MessagesRequest,
    check_request,
    check_thinking,
    names_of,
    read_conversation,
    read_request,
    read_tools,
    template_variables,
    thinking_budget,
)
from bough.server.anthropic.writing import Message, MessageWriter, TokensCount
from bough.server.context import Rendered, ServerContext
from bough.server.endpoint import ANTHROPIC, EVENTS, Endpoint, json_response
from bough.server.errors import set_field_names
from bough.server.messages import continues, text_of
from bough.server.parsing import AnswerPlan, plan_answers
from bough.server.streaming import respond


def routes(context: ServerContext) -> list[Endpoint]:
    api = Anthropic(context)
    answer: dict[str, Any] = {"body": MessagesRequest, "answer": Message, "other_types": (EVENTS,), **ANTHROPIC}
    count: dict[str, Any] = {"body": CountTokensRequest, "answer": TokensCount, **ANTHROPIC}
    return [
        Endpoint("/v1/messages", api.messages, "Answer a conversation", **answer),
        Endpoint("/v1/messages/count_tokens", api.count_tokens, "How many tokens a conversation has", **count),
    ]


class Anthropic:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        id = (body.resume and body.resume.id) or f"msg_{uuid.uuid4().hex}"
        set_field_names(names_of(body))
        plan = self._plan(body)
        prompt, continued = await self._prompt(body, plan)
        given, budget = read_request(body, id), thinking_budget(body.thinking)
        inputs, form = await self._context.plan_inputs(plan, prompt, given, continued, budget)
        client, stream, timed = self._context.client, body.stream, body.return_timings
        writer = MessageWriter(id, self._context.model.name, timed, form)
        return await respond(client, request, inputs, writer, stream=stream, timed=timed)

    async def count_tokens(self, request: Request, body: CountTokensRequest) -> Response:
        prompt, _ = await self._prompt(body, self._plan(body))
        if not prompt.media:
            return json_response(TokensCount(len(prompt.ids)))
        inputs = await self._context.read_inputs(input_ids=prompt.ids, media=prompt.media)
        return json_response(TokensCount(len(inputs.prompts[0].ids)))

    def _plan(self, body: CountTokensRequest) -> AnswerPlan:
        check_request(body)
        check_thinking(body.thinking, self._context.settings)
        return plan_answers(self._context.settings, read_tools(body), self._context.tokenizer)

    async def _prompt(self, body: CountTokensRequest, plan: AnswerPlan) -> tuple[Rendered, str]:
        turns = read_conversation(body)
        prompt = await self._context.render(
            turns,
            tools=plan.tools.shown,
            variables=template_variables(body),
            continue_final_message=continues(turns),
            whole=not isinstance(body, MessagesRequest),  # a count is one of all tokens
        )
        return prompt, text_of(turns[-1]["content"]) if continues(turns) else ""
