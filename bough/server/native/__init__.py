"""SGLang's own API: generation, information, management, tokens, parsers."""

from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from bough.server.native.control import control_routes
from bough.server.native.generate import generate_routes, text_routes
from bough.server.native.info import info_routes
from bough.server.native.weights import weight_routes


def routes(context: ServerContext) -> list[Endpoint]:
    makers = (generate_routes, info_routes, text_routes, control_routes, weight_routes)
    return [endpoint for make in makers for endpoint in make(context)]
