"""The model's tokenizer and parsers for clients that have none: /tokenize, /detokenize, /parse_function_call and
/separate_reasoning.
"""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import RequestError
from bough.parsers import AnswerFormat, reasoning_format, tool_format
from bough.server.bodies import given_fields
from bough.server.context import MAX_REQUESTS_PER_CALL, ServerContext, offload
from bough.server.endpoint import Endpoint, json_response
from bough.server.errors import set_field_names, shape_of
from bough.server.messages import read_messages
from bough.server.native import schemas
from bough.server.openai.requests import choose_tools
from bough.server.parsing import any_of, read_functions
from bough.tokenizer.tokenizer import Tokenizer

MAX_TOKENS = 1 << 20  # to detokenize in one request, which takes about a second


def text_routes(context: ServerContext) -> list[Endpoint]:
    parse, separate = partial(parse_function_call, context), partial(separate_reasoning, context)
    reading: dict[str, Any] = {"body": schemas.TokenizeBody, "answer": schemas.TokenizeOutput}
    writing: dict[str, Any] = {"body": schemas.DetokenizeBody, "answer": schemas.DetokenizeOutput}
    calling: dict[str, Any] = {"body": schemas.ParseCallBody, "answer": schemas.ParsedCalls}
    thinking: dict[str, Any] = {"body": schemas.SeparateBody, "answer": schemas.Separated}
    made: list[Endpoint] = []
    for prefix in ("", "/v1"):
        shape = shape_of(f"{prefix}/tokenize")
        made += [
            Endpoint(f"{prefix}/tokenize", partial(tokenize, context), "Text to token ids", shape=shape, **reading),
            Endpoint(f"{prefix}/detokenize", partial(detokenize, context), "Token ids to text", shape=shape, **writing),
        ]
    return [
        *made,
        Endpoint("/parse_function_call", parse, "Find the calls in a model's text", **calling),
        Endpoint("/separate_reasoning", separate, "Tell the thinking in a model's text from the answer", **thinking),
    ]


async def tokenize(context: ServerContext, request: Request, body: schemas.TokenizeBody) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages to tokenize.", field="prompt")
    if body.prompt is not None and body.tools:
        raise RequestError("tools are a part of conversations; give messages instead of prompt.", field="tools")
    tokenizer = context.require_tokenizer("prompt")
    set_field_names({"input_ids": "messages" if body.prompt is None else "prompt"})
    lists = await (_tokenize_messages(body, context) if body.prompt is None else _tokenize(body, tokenizer))
    length = context.model.context_length
    if isinstance(body.prompt, list):
        return json_response({"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": length})
    return json_response({"tokens": lists[0], "count": len(lists[0]), "max_model_len": length})


async def _tokenize(body: schemas.TokenizeBody, tokenizer: Tokenizer) -> list[list[int]]:
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
    if len(texts) > MAX_REQUESTS_PER_CALL:
        raise RequestError(f"prompt has {len(texts)} texts; at most {MAX_REQUESTS_PER_CALL} are taken.", field="prompt")
    special = body.add_special_tokens is not False
    return await offload(sum(map(len, texts)), lambda: list(tokenizer.encode_each(texts, special, whole=True)))


async def _tokenize_messages(body: schemas.TokenizeBody, context: ServerContext) -> list[list[int]]:
    """The prompt that /v1/chat/completions makes of the same messages."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    options: dict[str, Any] = {"variables": effort | (body.chat_template_kwargs or {}), "whole": True}
    options |= given_fields(body, ("add_generation_prompt", "continue_final_message"))
    messages = await offload(0, lambda: read_messages(body.messages))
    tools = choose_tools(read_functions(body.tools), body.tool_choice).shown
    return [(await context.render(messages, tools=tools, **options)).ids]


async def detokenize(context: ServerContext, request: Request, body: schemas.DetokenizeBody) -> Response:
    tokenizer = context.require_tokenizer("tokens")
    many = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: list[Any] = body.tokens if many else [body.tokens]
    count = sum(len(ids) if isinstance(ids, list) else 1 for ids in lists)
    if count > MAX_TOKENS:
        raise RequestError(f"tokens has {count} ids; at most {MAX_TOKENS} are taken.", field="tokens")
    for ids in lists:
        if not isinstance(ids, list) or any(not isinstance(token, int) for token in ids):
            raise RequestError("tokens must be a list of token ids, or a list of such lists.", field="tokens")
        wrong = next((token for token in ids if not 0 <= token < context.model.vocab_size), None)
        if wrong is not None:
            last = context.model.vocab_size - 1
            raise RequestError(f"tokens: {wrong} is outside the vocabulary (0 to {last}).", field="tokens")
    skip = body.skip_special_tokens is not False
    texts = await offload(sum(map(len, lists)), lambda: [tokenizer.decode(ids, skip) for ids in lists])
    return json_response({"text": texts if many else texts[0]})


async def parse_function_call(context: ServerContext, request: Request, body: schemas.ParseCallBody) -> Response:
    name = _chosen(body.tool_call_parser, context.settings.model.tool_call_parser, "tool_call_parser")
    tools = any_of(read_functions(body.tools)).schemas
    form = AnswerFormat(tool_format=tool_format(name, "tool_call_parser"), tools=tools)
    parsed = await offload(len(body.text), lambda: form.parse(body.text))
    places = {tool: i for i, tool in enumerate(tools)}
    calls = [schemas.ParsedCall(places[call.name], call.name, call.arguments) for call in parsed.calls]
    return json_response(schemas.ParsedCalls(parsed.text, calls))


async def separate_reasoning(context: ServerContext, request: Request, body: schemas.SeparateBody) -> Response:
    """There is no prompt to look at, so the format alone says whether the text begins with thinking. An answer after
    thinking is trimmed, which a stream can do only at its beginning."""
    name = _chosen(body.reasoning_parser, context.settings.model.reasoning_parser, "reasoning_parser")
    kind = reasoning_format(name, "reasoning_parser")
    form = AnswerFormat(reasoning=kind, thinking=kind.forced)
    parsed = await offload(len(body.text), lambda: form.parse(body.text))
    return json_response(schemas.Separated(parsed.reasoning, parsed.text.strip() if parsed.reasoning else parsed.text))


def _chosen(given: str | None, own: str | None, field: str) -> str:
    name = given or own
    if name is None:
        raise RequestError(f"Give a {field}; this server was started without one.", field=field)
    return name
