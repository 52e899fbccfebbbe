"""OpenAI's protocol: completions, chats, models and responses, with SGLang's extra fields.

`schema` is what clients send and `objects` what they get; `limits`, `reading` and `messages` turn the first into the
engine's requests, `completions`, `chat` and `responses` turn answers into the second, `chunks` makes streams cheap;
`generation`, `response_routes` and `models` connect both ends.
"""

from __future__ import annotations

from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from bough.server.openai.generation import generation_routes
from bough.server.openai.models import model_routes
from bough.server.openai.response_routes import response_routes


def routes(context: ServerContext) -> list[Endpoint]:
    """Every endpoint of OpenAI's API that this server has."""
    return [*generation_routes(context), *response_routes(context), *model_routes(context)]
