"""`/parse_function_call` and `/separate_reasoning`: the parsers for clients that made a text elsewhere."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import RequestError
from bough.parsers import AnswerFormat, reasoning_format, tool_format
from bough.server.bodies import read_body
from bough.server.context import ServerContext, offload
from bough.server.endpoint import Endpoint, json_response
from bough.server.native.schemas import ParseCallBody, ParsedCall, ParsedCalls, SeparateBody, Separated
from bough.server.parsing import any_of, read_functions


def parser_routes(context: ServerContext) -> list[Endpoint]:
    return [
        Endpoint(
            "/parse_function_call",
            partial(parse_function_call, context),
            "Find the calls in a model's text",
            body=ParseCallBody,
            answer=ParsedCalls,
        ),
        Endpoint(
            "/separate_reasoning",
            partial(separate_reasoning, context),
            "Tell the thinking in a model's text from the answer",
            body=SeparateBody,
            answer=Separated,
        ),
    ]


async def parse_function_call(context: ServerContext, request: Request) -> Response:
    body = await read_body(request, ParseCallBody)
    name = _chosen(body.tool_call_parser, context.settings.model.tool_call_parser, "tool_call_parser")
    tools = any_of(read_functions(body.tools)).schemas
    form = AnswerFormat(tool_format=tool_format(name, "tool_call_parser"), tools=tools)
    parsed = await offload(len(body.text), lambda: form.parse(body.text))
    places = {tool: i for i, tool in enumerate(tools)}
    calls = [ParsedCall(places[call.name], call.name, call.arguments) for call in parsed.calls]
    return json_response(ParsedCalls(parsed.text, calls))


async def separate_reasoning(context: ServerContext, request: Request) -> Response:
    """There is no prompt to look at, so the format alone says whether the text begins with thinking. An answer after
    thinking is trimmed, which a stream can do only at its beginning."""
    body = await read_body(request, SeparateBody)
    name = _chosen(body.reasoning_parser, context.settings.model.reasoning_parser, "reasoning_parser")
    kind = reasoning_format(name, "reasoning_parser")
    form = AnswerFormat(reasoning=kind, thinking=kind.forced)
    parsed = await offload(len(body.text), lambda: form.parse(body.text))
    return json_response(Separated(parsed.reasoning, parsed.text.strip() if parsed.reasoning else parsed.text))


def _chosen(given: str | None, own: str | None, field: str) -> str:
    name = given or own
    if name is None:
        raise RequestError(f"Give a {field}; this server was started without one.", field=field)
    return name
