"""All of OpenAI's endpoints."""

from __future__ import annotations

from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from bough.server.openai.generation import generation_routes
from bough.server.openai.models import model_routes
from bough.server.openai.response_routes import response_routes


def routes(context: ServerContext) -> list[Endpoint]:
    """Every endpoint of OpenAI's API that this server has."""
    return [*generation_routes(context), *response_routes(context), *model_routes(context)]
