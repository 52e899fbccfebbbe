"""`/tokenize` and `/detokenize`: the model's tokenizer for clients that have none."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import RequestError
from bough.server.bodies import read_body
from bough.server.context import MAX_REQUESTS_PER_CALL, ServerContext, offload
from bough.server.endpoint import Endpoint, json_response
from bough.server.errors import set_field_names, shape_of
from bough.server.messages import read_messages
from bough.server.native.schemas import DetokenizeBody, DetokenizeOutput, TokenizeBody, TokenizeOutput
from bough.tokenizer.tokenizer import Tokenizer

MAX_TOKENS = 1 << 20  # to detokenize in one request, which takes about a second


def token_routes(context: ServerContext) -> list[Endpoint]:
    made: list[Endpoint] = []
    for prefix in ("", "/v1"):
        made += [
            Endpoint(
                f"{prefix}/tokenize",
                partial(tokenize, context),
                "Text to token ids",
                body=TokenizeBody,
                answer=TokenizeOutput,
                shape=shape_of(f"{prefix}/tokenize"),
            ),
            Endpoint(
                f"{prefix}/detokenize",
                partial(detokenize, context),
                "Token ids to text",
                body=DetokenizeBody,
                answer=DetokenizeOutput,
                shape=shape_of(f"{prefix}/detokenize"),
            ),
        ]
    return made


async def tokenize(context: ServerContext, request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages to tokenize.", field="prompt")
    tokenizer = context.require_tokenizer("prompt")
    set_field_names({"input_ids": "messages" if body.prompt is None else "prompt"})
    lists = await (_tokenize_messages(body, context) if body.prompt is None else _tokenize(body, tokenizer))
    length = context.model.context_length
    if isinstance(body.prompt, list):
        return json_response({"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": length})
    return json_response({"tokens": lists[0], "count": len(lists[0]), "max_model_len": length})


async def _tokenize(body: TokenizeBody, tokenizer: Tokenizer) -> list[list[int]]:
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
    if len(texts) > MAX_REQUESTS_PER_CALL:
        raise RequestError(f"prompt has {len(texts)} texts; at most {MAX_REQUESTS_PER_CALL} are taken.", field="prompt")
    special = body.add_special_tokens is not False
    return await offload(sum(map(len, texts)), lambda: list(tokenizer.encode_each(texts, special, whole=True)))


async def _tokenize_messages(body: TokenizeBody, context: ServerContext) -> list[list[int]]:
    """The prompt that /v1/chat/completions makes of the same messages."""
    variables, add = body.chat_template_kwargs, body.add_generation_prompt
    messages = read_messages(body.messages)
    return [(await context.render(messages, variables=variables, add_generation_prompt=add, whole=True)).ids]


async def detokenize(context: ServerContext, request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
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
