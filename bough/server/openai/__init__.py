"""OpenAI's protocol: completions, chats, models and responses, with SGLang's extra fields.

`requests` is what clients send and what the engine makes of it, `objects` and `response_items` are what they get;
`completions`, `chat` and `responses` connect both ends. `vectors` is all of embeddings and scores, `audio` that of
recordings.
"""

from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from bough.server.context import ServerContext
from bough.server.endpoint import EVENTS, GET, OPENAI, Endpoint, json_response
from bough.server.errors import HttpError
from bough.server.openai.audio import audio_routes
from bough.server.openai.chat import chat
from bough.server.openai.completions import complete
from bough.server.openai.objects import ChatChunk, ChatCompletion, Completion, ModelCard, ModelList
from bough.server.openai.requests import ChatRequest, CompletionRequest, ResponsesRequest
from bough.server.openai.response_items import ResponseObject
from bough.server.openai.responses import Responses
from bough.server.openai.vectors import vector_routes

STREAMED: dict[str, Any] = {**OPENAI, "other_types": (EVENTS,)}
COMPLETION: dict[str, Any] = {**STREAMED, "body": CompletionRequest, "answer": Completion, "event": Completion}
CHAT: dict[str, Any] = {**STREAMED, "body": ChatRequest, "answer": ChatCompletion, "event": ChatChunk}
RESPONSE: dict[str, Any] = {**STREAMED, "body": ResponsesRequest, "answer": ResponseObject}
SHOWN: dict[str, Any] = {**OPENAI, "methods": GET}
STORED: dict[str, Any] = {**OPENAI, "answer": ResponseObject}


def routes(context: ServerContext) -> list[Endpoint]:
    model, responses, answer = context.model, Responses(context), partial(chat, context)
    card = ModelCard(id=model.name, created=model.created, root=model.name, max_model_len=model.context_length)

    async def cards() -> list[ModelCard]:
        states = await context.states() if context.settings.lora.enable_lora else ()
        adapters = {name: path for state in states for name, path in state["loaded_adapters"].items()}
        return [card, *(replace(card, id=name, root=path, parent=model.name) for name, path in adapters.items())]

    async def list_models(request: Request) -> Response:
        return json_response(ModelList(data=await cards()))

    async def show_model(request: Request) -> Response:
        """Generation accepts any model name, unless there are adapters; this route only what is served."""
        name = request.path_params["model"]
        names = (name, context.adapter_of(name) or name)  # base:adapter, too
        found = next((each for each in await cards() if each.id in names), None)
        if found is None:
            raise HttpError(404, f"There is no model {name!r} here; this server has {model.name!r}.", "NotFoundError")
        return json_response(found)

    return [
        Endpoint("/v1/completions", partial(complete, context), "Continue one prompt or several", **COMPLETION),
        Endpoint("/v1/chat/completions", answer, "Answer a conversation", **CHAT),
        Endpoint("/invocations", answer, "Same as /v1/chat/completions, for SageMaker", **CHAT),
        Endpoint("/v1/responses", responses.create, "Answer a conversation and remember it", **RESPONSE),
        Endpoint("/v1/responses/{id}", responses.retrieve, "A response that was stored", methods=GET, **STORED),
        Endpoint("/v1/responses/{id}/cancel", responses.cancel, "End a response that still runs", **STORED),
        *vector_routes(context),
        *audio_routes(context),
        Endpoint("/v1/models", list_models, "The model that is served, and its adapters", answer=ModelList, **SHOWN),
        Endpoint("/v1/models/{model:path}", show_model, "One model by its name", answer=ModelCard, **SHOWN),
    ]
