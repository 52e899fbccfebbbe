"""All of OpenAI's endpoints; /v1/models, which lists the one model that is served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from bough.server.context import ServerContext
from bough.server.endpoint import GET, OPENAI, Endpoint, json_response
from bough.server.errors import HttpError
from bough.server.model_info import ModelInfo
from bough.server.openai.chat import Chats
from bough.server.openai.completions import Completions
from bough.server.openai.objects import ModelCard, ModelList
from bough.server.openai.response_routes import response_routes


def model_routes(context: ServerContext) -> list[Endpoint]:
    async def list_models(request: Request) -> Response:
        return json_response(model_list(context.model))

    async def show_model(request: Request) -> Response:
        return json_response(find_model(context.model, request.path_params["model"]))

    return [
        Endpoint("/v1/models", list_models, "The models that are served: one", methods=GET, answer=ModelList, **OPENAI),
        Endpoint(
            "/v1/models/{model:path}", show_model, "One model by its name", methods=GET, answer=ModelCard, **OPENAI
        ),
    ]


def model_list(model: ModelInfo) -> ModelList:
    return ModelList(data=[model_card(model)])


def model_card(model: ModelInfo) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, root=model.name, max_model_len=model.context_length)


def find_model(model: ModelInfo, name: str) -> ModelCard:
    """The card of the model by this name. Generation accepts any model name; this route only the served one."""
    if name != model.name:
        raise HttpError(404, f"There is no model {name!r} here; this server has {model.name!r}.", "NotFoundError")
    return model_card(model)


def routes(context: ServerContext) -> list[Endpoint]:
    """Every endpoint of OpenAI's API that this server has."""
    return [*Completions(context).routes(), *Chats(context).routes(), *response_routes(context), *model_routes(context)]
