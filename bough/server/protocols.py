"""All protocols of the server as one list of endpoints."""

from __future__ import annotations

from bough.server.anthropic import routes as anthropic
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from bough.server.native import routes as native
from bough.server.native.info import metrics_routes
from bough.server.ollama import routes as ollama
from bough.server.openai import routes as openai
from bough.server.openapi import described


def all_endpoints(context: ServerContext) -> list[Endpoint]:
    endpoints = [*native(context), *openai(context), *anthropic(context), *ollama(context)]
    return described([*endpoints, *metrics_routes(context)], context.settings.server)
