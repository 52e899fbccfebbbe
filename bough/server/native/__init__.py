"""SGLang's own API: generation, information, management, tokens, parsers."""

from __future__ import annotations

from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from bough.server.native.control import control_routes
from bough.server.native.generate import generate_routes
from bough.server.native.info import info_routes
from bough.server.native.text import text_routes


def routes(context: ServerContext) -> list[Endpoint]:
    return [*generate_routes(context), *info_routes(context), *text_routes(context), *control_routes(context)]
