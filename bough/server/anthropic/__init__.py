"""Anthropic's protocol: messages, whole and streamed, and the count of their tokens."""

import uuid
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.server.anthropic import requests
from bough.server.anthropic.writing import Message, MessageWriter, TokensCount
from bough.server.context import ServerContext, offload
from bough.server.endpoint import ANTHROPIC, EVENTS, Endpoint, json_response
from bough.server.errors import set_field_names
from bough.server.messages import continues
from bough.server.parsing import AnswerPlan, plan_answers
from bough.server.streaming import respond

COUNT = "How many tokens a conversation has"


def routes(context: ServerContext) -> list[Endpoint]:
    streamed: dict[str, Any] = {"other_types": (EVENTS,), **ANTHROPIC}
    answer: dict[str, Any] = {"body": requests.MessagesRequest, "answer": Message, **streamed}
    count: dict[str, Any] = {"body": requests.CountTokensRequest, "answer": TokensCount, **ANTHROPIC}
    return [
        Endpoint("/v1/messages", partial(messages, context), "Answer a conversation", **answer),
        Endpoint("/v1/messages/count_tokens", partial(count_tokens, context), COUNT, **count),
    ]


async def messages(context: ServerContext, request: Request, body: requests.MessagesRequest) -> Response:
    id = (body.resume and body.resume.id) or f"msg_{uuid.uuid4().hex}"
    set_field_names(requests.names_of(body))
    plan, turns = _plan(context, body), await offload(0, lambda: requests.read_conversation(body))
    inputs, form = await context.converse(
        plan,
        turns,
        requests.read_request(body, id),
        variables=requests.template_variables(body),
        continued=continues(turns),
        budget=requests.thinking_budget(body.thinking),
    )
    writer = MessageWriter(id, context.model.name, body.return_timings, form)
    return await respond(context.client, request, inputs, writer, stream=body.stream)


async def count_tokens(context: ServerContext, request: Request, body: requests.CountTokensRequest) -> Response:
    plan, turns = _plan(context, body), await offload(0, lambda: requests.read_conversation(body))
    prompt = await context.render(
        turns,
        tools=plan.tools.shown,
        variables=requests.template_variables(body),
        continue_final_message=continues(turns),
        keep="all",  # a count is one of all tokens
    )
    if not prompt.media:
        return json_response(TokensCount(len(prompt.ids)))
    inputs = await context.read_inputs(input_ids=prompt.ids, media=prompt.media)
    return json_response(TokensCount(len(inputs.prompts[0].ids)))


def _plan(context: ServerContext, body: requests.CountTokensRequest) -> AnswerPlan:
    requests.check_request(body)
    requests.check_thinking(body.thinking, context.settings)
    return plan_answers(context.settings, requests.read_tools(body), context.tokenizer)
