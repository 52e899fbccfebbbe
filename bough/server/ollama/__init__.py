"""Ollama's protocol: chats and completions as lines of JSON, and what there is to know of the model."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.client.inputs import Inputs
from bough.core.settings import Settings
from bough.parsers import AnswerFormat
from bough.server.context import ServerContext
from bough.server.endpoint import GET, OLLAMA, Endpoint, json_response
from bough.server.errors import set_field_names
from bough.server.grammars import ollama_format
from bough.server.messages import Message, continues, read_media, text_of
from bough.server.model_info import ModelInfo
from bough.server.ollama.requests import (
    NAMES,
    AnswerFields,
    ChatRequest,
    GenerateRequest,
    Options,
    ShowRequest,
    check_request,
    read_chat,
    read_prompt,
    sampling_of,
    template_variables,
)
from bough.server.ollama.writing import (
    LINES,
    ChatAnswer,
    GenerateAnswer,
    LineWriter,
    ModelDescription,
    ModelDetails,
    ModelEntry,
    ModelList,
    timestamp,
)
from bough.server.parsing import AnswerPlan, any_of, plan_answers, read_functions
from bough.server.streaming import respond

LINES_OF_JSON = "streamed as lines of JSON unless stream is false"
STREAMED: dict[str, Any] = {"other_types": (LINES,), **OLLAMA}


def routes(context: ServerContext) -> list[Endpoint]:
    api = Ollama(context)
    chat: dict[str, Any] = {"body": ChatRequest, "answer": ChatAnswer, **STREAMED}
    generate: dict[str, Any] = {"body": GenerateRequest, "answer": GenerateAnswer, **STREAMED}
    show: dict[str, Any] = {"body": ShowRequest, "answer": ModelDescription, **OLLAMA}
    return [
        Endpoint("/api/chat", api.chat, f"Answer a conversation; {LINES_OF_JSON}", **chat),
        Endpoint("/api/generate", api.generate, f"Answer a prompt; {LINES_OF_JSON}", **generate),
        Endpoint("/api/tags", api.tags, "The models that are served: one", methods=GET, answer=ModelList, **OLLAMA),
        Endpoint("/api/show", api.show, "What is known of the model", **show),
    ]


def model_entry(model: ModelInfo) -> ModelEntry:
    return ModelEntry(
        name=model.name,
        model=model.name,
        modified_at=timestamp(model.created),
        size=0,  # the HTTP process does not read weights
        digest=hashlib.sha256(model.name.encode()).hexdigest(),
        details=model_details(model),
    )


def describe(model: ModelInfo, settings: Settings) -> ModelDescription:
    """Clients ask about the name that they will chat with, and every name is served by the one model."""
    details = model_details(model)
    parsers = {"tools": settings.model.tool_call_parser, "thinking": settings.model.reasoning_parser}
    return ModelDescription(
        modelfile=f"FROM {model.name}",
        details=details,
        model_info={
            "general.architecture": details.family,
            "general.basename": model.name,
            f"{details.family}.context_length": model.context_length,
            f"{details.family}.vocab_size": model.vocab_size,
        },
        capabilities=["completion", *(name for name, parser in parsers.items() if parser is not None)],
        modified_at=timestamp(model.created),
    )


def model_details(model: ModelInfo) -> ModelDetails:
    family = model.architecture.removesuffix("ForCausalLM").lower()
    kind = "gguf" if model.path.endswith(".gguf") else "safetensors"
    return ModelDetails(format=kind, family=family, families=[family])


class Ollama:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def tags(self, request: Request) -> Response:
        return json_response(ModelList([model_entry(self._context.model)]))

    async def show(self, request: Request, body: ShowRequest) -> Response:
        return json_response(describe(self._context.model, self._context.settings))

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        set_field_names(NAMES)
        sampling = self._read(body)
        plan = plan_answers(self._context.settings, any_of(read_functions(body.tools)), self._context.tokenizer)
        if not body.messages:
            return json_response(self._writer(body, None, chat=True).loaded())
        inputs, form = await self._templated(read_chat(body), body, sampling, plan)
        return await self._answer(request, body, inputs, self._writer(body, form, chat=True))

    async def generate(self, request: Request, body: GenerateRequest) -> Response:
        form = None
        set_field_names(NAMES)
        sampling = self._read(body)
        if not body.prompt:
            return json_response(self._writer(body, form, chat=False).loaded())
        if self._is_plain(body):
            media = read_media(read_prompt(body), self._context.client.media_kinds, "images")
            inputs = await self._context.read_inputs(prompt=body.prompt, media=media, sampling_params=sampling)
        else:
            plan = plan_answers(self._context.settings)
            inputs, form = await self._templated(read_prompt(body), body, sampling, plan)
        return await self._answer(request, body, inputs, self._writer(body, form, chat=False))

    def _writer(self, body: AnswerFields, form: AnswerFormat | None, *, chat: bool) -> LineWriter:
        return LineWriter(self._context.model.name, chat=chat, timed=body.return_timings, form=form)

    def _read(self, body: AnswerFields) -> dict[str, Any]:
        check_request(body, self._context.settings)
        return {
            **sampling_of(body.options or Options(), self._context.model.context_length),
            **ollama_format(body.format),
        }

    def _is_plain(self, body: GenerateRequest) -> bool:
        """Whether the prompt is continued as it is: on demand, and where a model has no template to put it in."""
        tokenizer = self._context.require_tokenizer("prompt")
        return bool(body.raw) or (not tokenizer.has_chat_template and not body.system)

    async def _templated(
        self, turns: list[Message], body: AnswerFields, sampling: dict[str, Any], plan: AnswerPlan
    ) -> tuple[Inputs, AnswerFormat]:
        """An answer to a conversation that ends with the assistant's text continues it."""
        goes_on = continues(turns)
        prompt = await self._context.render(
            turns, tools=plan.tools.shown, variables=template_variables(body), continue_final_message=goes_on
        )
        continued = text_of(turns[-1]["content"]) if goes_on else ""
        return await self._context.plan_inputs(plan, prompt, {"sampling_params": sampling}, continued)

    async def _answer(self, request: Request, body: AnswerFields, inputs: Inputs, writer: LineWriter) -> Response:
        client, stream = self._context.client, body.stream is not False
        return await respond(client, request, inputs, writer, stream=stream, timed=body.return_timings)
