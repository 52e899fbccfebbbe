"""Ollama's protocol: chats and completions as lines of JSON, and what there is to know of the model."""

import hashlib
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.client.inputs import Inputs
from bough.parsers import AnswerFormat
from bough.server.context import ServerContext, offload
from bough.server.endpoint import GET, OLLAMA, Endpoint, json_response
from bough.server.errors import set_field_names
from bough.server.grammars import ollama_format
from bough.server.messages import Message, continues, read_media
from bough.server.model_info import ModelInfo
from bough.server.ollama import requests, writing
from bough.server.parsing import AnswerPlan, any_of, plan_answers, read_functions
from bough.server.streaming import respond

LINES_OF_JSON = "streamed as lines of JSON unless stream is false"
STREAMED: dict[str, Any] = {"other_types": (writing.LINES,), **OLLAMA}


def routes(context: ServerContext) -> list[Endpoint]:
    tags = partial(list_models, context)
    chatting: dict[str, Any] = {"body": requests.ChatRequest, "answer": writing.ChatAnswer, **STREAMED}
    generating: dict[str, Any] = {"body": requests.GenerateRequest, "answer": writing.GenerateAnswer, **STREAMED}
    show: dict[str, Any] = {"body": requests.ShowRequest, "answer": writing.ModelDescription, **OLLAMA}
    return [
        Endpoint("/api/chat", partial(chat, context), f"Answer a conversation; {LINES_OF_JSON}", **chatting),
        Endpoint("/api/generate", partial(generate, context), f"Answer a prompt; {LINES_OF_JSON}", **generating),
        Endpoint("/api/tags", tags, "The models that are served: one", methods=GET, answer=writing.ModelList, **OLLAMA),
        Endpoint("/api/show", partial(show_model, context), "What is known of the model", **show),
    ]


async def list_models(context: ServerContext, request: Request) -> Response:
    model = context.model
    entry = writing.ModelEntry(
        name=model.name,
        model=model.name,
        modified_at=writing.timestamp(model.created),
        size=0,  # the HTTP process does not read weights
        digest=hashlib.sha256(model.name.encode()).hexdigest(),
        details=model_details(model),
    )
    return json_response(writing.ModelList([entry]))


async def show_model(context: ServerContext, request: Request, body: requests.ShowRequest) -> Response:
    """Clients ask about the name that they will chat with, and every name is served by the one model."""
    model, options = context.model, context.settings.model
    details = model_details(model)
    can = {"vision": "image" in context.client.media_kinds}
    can |= {"tools": options.tool_call_parser is not None, "thinking": options.reasoning_parser is not None}
    description = writing.ModelDescription(
        modelfile=f"FROM {model.name}",
        details=details,
        model_info={
            "general.architecture": details.family,
            "general.basename": model.name,
            f"{details.family}.context_length": model.context_length,
            f"{details.family}.vocab_size": model.vocab_size,
        },
        capabilities=["completion", *(name for name, able in can.items() if able)],
        modified_at=writing.timestamp(model.created),
    )
    return json_response(description)


def model_details(model: ModelInfo) -> writing.ModelDetails:
    family = model.architecture.removesuffix("ForCausalLM").lower()
    kind = "gguf" if model.path.endswith(".gguf") else "safetensors"
    return writing.ModelDetails(format=kind, family=family, families=[family])


async def chat(context: ServerContext, request: Request, body: requests.ChatRequest) -> Response:
    given = _read(context, body)
    plan = plan_answers(context.settings, any_of(read_functions(body.tools)), context.tokenizer)
    if not body.messages:
        return json_response(_writer(context, body).loaded())
    turns = await offload(0, lambda: requests.read_chat(body))
    return await _converse(context, request, body, turns, given, plan)


async def generate(context: ServerContext, request: Request, body: requests.GenerateRequest) -> Response:
    given = _read(context, body)
    if not body.prompt:
        return json_response(_writer(context, body).loaded())
    tokenizer = context.require_tokenizer("prompt")
    turns = await offload(0, lambda: requests.read_prompt(body))
    # It is continued as it is on demand, and where a model has no template to put it in.
    if body.raw or not (tokenizer.chat_template or body.system):
        media = read_media(turns, context.client.media_kinds, "images")
        inputs = await context.read_inputs(prompt=body.prompt, media=media, **given)
        return await _answer(context, request, body, inputs, None)
    return await _converse(context, request, body, turns, given, plan_answers(context.settings))


def _read(context: ServerContext, body: requests.AnswerFields) -> dict[str, Any]:
    set_field_names(requests.NAMES)
    requests.check_request(body, context.settings)
    options = body.options or requests.Options()
    limited = options.num_predict is not None and options.num_predict >= 0
    sampling = requests.sampling_of(options, None if limited else context.model.context_length)
    return {"sampling_params": sampling | ollama_format(body.format), "overlong": "cut" if limited else "none"}


async def _converse(
    context: ServerContext,
    request: Request,
    body: requests.AnswerFields,
    turns: list[Message],
    given: dict[str, Any],
    plan: AnswerPlan,
) -> Response:
    """An answer to a conversation that ends with the assistant's text continues it."""
    variables = requests.template_variables(body)
    inputs, form = await context.converse(plan, turns, given, variables=variables, continued=continues(turns))
    return await _answer(context, request, body, inputs, form)


def _writer(
    context: ServerContext, body: requests.AnswerFields, form: AnswerFormat | None = None
) -> writing.LineWriter:
    chat = isinstance(body, requests.ChatRequest)
    return writing.LineWriter(context.model.name, chat=chat, timed=body.return_timings, form=form)


async def _answer(
    context: ServerContext, request: Request, body: requests.AnswerFields, inputs: Inputs, form: AnswerFormat | None
) -> Response:
    return await respond(context.client, request, inputs, _writer(context, body, form), stream=body.stream is not False)
