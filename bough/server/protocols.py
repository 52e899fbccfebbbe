"""All protocols of the server as one list of endpoints, and the OpenAPI page, made of what the endpoints declare and of
the structs that their bodies are decoded into."""

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from bough.core.server_settings import ServerSettings
from bough.server import anthropic, native, ollama, openai
from bough.server.context import ServerContext
from bough.server.endpoint import EVENTS, Endpoint, encode_json
from bough.server.errors import Shape, anthropic_shape, native_shape, ollama_shape, openai_shape
from bough.server.live_tree import page_routes
from bough.version import __version__

TEXT = {"type": "string"}
TEXT_OR_NULL = {"anyOf": [TEXT, {"type": "null"}]}


def _object(optional: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**fields, **(optional or {})}, "required": list(fields)}


NATIVE_ERROR = {"message": TEXT, "type": TEXT, "code": {"type": "integer"}, "retryable": {"type": "boolean"}}
ERROR_SCHEMAS: dict[Shape, Any] = {
    native_shape: _object(error=_object({"param": TEXT}, **NATIVE_ERROR)),
    openai_shape: _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL)),
    anthropic_shape: _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT)),
    ollama_shape: _object(error=TEXT),
}


DOCS_PAGE = Path(__file__).parent / "docs.html"  # reads openapi.json and shows it; needs no other server
Schemas = dict[str, dict[str, Any]]  # by the types' names
REF = "#/components/schemas/{name}"
JSON = "application/json"
OTHER_TYPES = {
    EVENTS: "Server-sent events, each with JSON as its data",
    "application/x-ndjson": "Lines, each of them JSON",
    "text/plain": "Text; of metrics in Prometheus' format",
}
CONVERTER = re.compile(r":\w+}")  # Starlette's way to say what a parameter may hold
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def all_endpoints(context: ServerContext) -> list[Endpoint]:
    """Those of all protocols, and the two that describe them. The description is made when it is first asked for: most
    servers never are."""

    @functools.cache
    def document() -> bytes:
        return encode_json(openapi_document(everything, context.settings.server))

    async def openapi(request: Request) -> Response:
        return Response(document(), media_type=JSON)

    async def docs(request: Request) -> Response:
        return HTMLResponse(DOCS_PAGE.read_bytes())

    common: dict[str, Any] = {"methods": ("GET",), "access": "open", "tag": "pages"}
    everything = [
        *native.routes(context),
        *openai.routes(context),
        *anthropic.routes(context),
        *ollama.routes(context),
        *page_routes(context),
        Endpoint("/openapi.json", openapi, "This description, for programs", answer=dict[str, Any], **common),
        Endpoint("/docs", docs, "This description, for people", media_type="text/html", **common),
    ]
    return everything


def openapi_document(endpoints: Sequence[Endpoint], settings: ServerSettings) -> dict[str, Any]:
    """OpenAPI 3.1, whose schemas are JSON Schema as msgspec writes it."""
    given = [(e.body, *(kind for _, kind in e.own_bodies), e.answer, e.event) for e in endpoints]
    types = [kind for kinds in given for kind in kinds if kind is not None]
    found, components = msgspec.json.schema_components(types, ref_template=REF)
    for component in components.values():
        if "description" in component:  # a docstring, as Python 3.13 has it
            component["description"] = inspect.cleandoc(component["description"])
    schemas = {str(kind): schema for kind, schema in zip(types, found, strict=True)}
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        operations = paths.setdefault(CONVERTER.sub("}", endpoint.path), {})
        for method in endpoint.methods:
            operations[method.lower()] = _operation(endpoint, method, schemas, settings)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Bough", "version": __version__, "description": "An LLM serving engine."},
        "servers": [{"url": settings.root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": KEY_SCHEMES},
    }


def _operation(endpoint: Endpoint, method: str, schemas: Schemas, settings: ServerSettings) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{endpoint.path}").strip("_"),
        "responses": {
            "200": {"description": "As asked", "content": _content(endpoint, schemas)},
            "default": {"description": "An error", "content": {JSON: {"schema": ERROR_SCHEMAS[endpoint.shape]}}},
        },
    }
    names = re.findall(r"{(\w+)[:}]", endpoint.path)
    parameters: list[dict[str, Any]] = [{"name": n, "in": "path", "required": True, "schema": TEXT} for n in names]
    for query in endpoint.queries:
        described = {"description": query.about, "schema": msgspec.json.schema(query.type)}
        parameters.append({"name": query.name, "in": "query", **described})
    if parameters:
        operation["parameters"] = parameters
    bodies = [] if method == "GET" else [(JSON, endpoint.body), *endpoint.own_bodies]
    content = {media: {"schema": schemas[str(kind)]} for media, kind in bodies if kind is not None}
    if content:
        operation["requestBody"] = {"content": content}
    keys = {"open": (), "api": (settings.api_key,)}.get(endpoint.access, (settings.api_key, settings.admin_api_key))
    if any(keys):
        operation["security"] = [{name: []} for name in KEY_SCHEMES]
    return operation


def _content(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    answer = {"type": "string"} if endpoint.answer is None else schemas[str(endpoint.answer)]
    content: dict[str, Any] = {endpoint.media_type: {"schema": answer}}
    for kind in endpoint.other_types:
        event = schemas[str(endpoint.event)] if kind == EVENTS and endpoint.event is not None else {}
        content[kind] = {"schema": {"description": OTHER_TYPES[kind], **event}}
    return content
