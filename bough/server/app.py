"""Finds the endpoint of a request and lets in whom its keys allow.

Owns the table of routes: exact paths are looked up, the few with parameters are matched. Paths work with and without
the prefix of `--root-path`, because some proxies cut it off and some do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from bough.core.settings import ServerSettings
from bough.server.bodies import SETTINGS_KEY
from bough.server.browsers import allowed_origins
from bough.server.endpoint import Endpoint
from bough.server.errors import Failure, HttpError, Shape, anthropic_shape, native_shape, ollama_shape, openai_shape
from bough.server.keys import Keys
from bough.server.request_id import HEADER
from bough.server.responses import error_response

Methods = dict[str, Endpoint]

# Which protocol's errors a path gets that leads to no endpoint.
SHAPES: tuple[tuple[str, Shape], ...] = (
    ("/v1/messages", anthropic_shape),
    ("/v1/", openai_shape),
    ("/api/", ollama_shape),
)


def shape_of(path: str) -> Shape:
    return next((shape for prefix, shape in SHAPES if path.startswith(prefix)), native_shape)


class Root:
    """The prefix under which a proxy shows this server (`--root-path`)."""

    def __init__(self, prefix: str) -> None:
        self._prefix = "/" + prefix.strip("/") if prefix.strip("/") else ""

    def without(self, path: str) -> str:
        """The path of a route; some proxies have cut the prefix off and some have not."""
        if self._prefix and (path == self._prefix or path.startswith(self._prefix + "/")):
            return path[len(self._prefix) :] or "/"
        return path


class App:
    """The routed endpoints; an ASGI application."""

    def __init__(self, endpoints: Sequence[Endpoint], settings: ServerSettings) -> None:
        self._settings = settings
        self._keys = Keys(settings.api_key, settings.admin_api_key)
        self._root = Root(settings.root_path)
        self._exact: dict[str, Methods] = {}
        patterns: dict[str, Methods] = {}
        for endpoint in endpoints:
            table = patterns if "{" in endpoint.path else self._exact
            methods = table.setdefault(endpoint.path, {})
            for method in endpoint.methods:
                if method in methods:
                    raise ValueError(f"{method} {endpoint.path} is declared twice")
                methods[method] = endpoint
        self._patterns = [(compile_path(path)[0], methods) for path, methods in patterns.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._root.without(scope["path"])
        methods, parameters = self._find(path)
        endpoint = _choose(methods, scope["method"])
        if endpoint is None:
            await error_response(_no_endpoint(path, scope["method"], methods), shape_of(path))(scope, receive, send)
            return
        try:
            self._keys.check(endpoint.access, scope["headers"])
        except HttpError as error:
            await error_response(error.failure, endpoint.shape)(scope, receive, send)
            return
        scope["path_params"] = parameters
        scope[SETTINGS_KEY] = self._settings
        await endpoint(scope, receive, send)

    def _find(self, path: str) -> tuple[Methods, dict[str, Any]]:
        found = self._exact.get(path)
        if found is not None:
            return found, {}
        matches = ((pattern.match(path), methods) for pattern, methods in self._patterns)
        return next(((methods, match.groupdict()) for match, methods in matches if match), ({}, {}))


def with_cors(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Tells browsers that web pages of the allowed origins may call the server."""
    origins = allowed_origins(settings)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[HEADER, "Server-Timing", "Retry-After"],
    )


def _choose(methods: Methods, method: str) -> Endpoint | None:
    return methods.get("GET" if method == "HEAD" else method)


def _no_endpoint(path: str, method: str, methods: Methods) -> Failure:
    if not methods:
        return Failure(404, f"There is no {path} here; /docs lists the routes.", "NotFoundError")
    allowed = ", ".join(sorted(methods))
    return Failure(405, f"{path} takes {allowed}, not {method}.", "MethodNotAllowedError", headers={"Allow": allowed})
