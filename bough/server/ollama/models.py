"""/api/tags and /api/show: the one model that is served, in Ollama's words."""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.responses import Response

from bough.core.settings import Settings
from bough.server.bodies import read_lenient_body
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from bough.server.errors import ollama_shape
from bough.server.model_info import ModelInfo
from bough.server.ollama.objects import ModelDescription, ModelDetails, ModelEntry, ModelList
from bough.server.ollama.schema import ShowRequest
from bough.server.ollama.writing import timestamp
from bough.server.responses import json_response


def model_routes(context: ServerContext) -> list[Endpoint]:
    async def tags(request: Request) -> Response:
        return json_response(ModelList([model_entry(context.model)]))

    async def show(request: Request) -> Response:
        await read_lenient_body(request, ShowRequest)
        return json_response(describe(context.model, context.settings))

    return [
        Endpoint(
            path="/api/tags",
            handler=tags,
            summary="The models that are served: one",
            methods=("GET",),
            answer=ModelList,
            shape=ollama_shape,
            tag="ollama",
        ),
        Endpoint(
            path="/api/show",
            handler=show,
            summary="What is known of the model",
            body=ShowRequest,
            answer=ModelDescription,
            shape=ollama_shape,
            tag="ollama",
        ),
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
