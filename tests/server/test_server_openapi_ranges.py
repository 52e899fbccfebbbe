"""The ranges on the OpenAPI page are those that the server keeps to: at each end, a value is served if the page allows
it and refused if it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bough.core.server_settings import ServerSettings
from bough.server.app import App
from bough.server.protocols import all_endpoints, openapi_document
from tests.fakes.scripted_engine import IM_END
from tests.server.native_engine import NativeEngine

jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="jsonschema_rs comes with schemathesis")

HI = [{"role": "user", "content": "hi"}]
# Path, the least that a request needs, and the field under which its numbers stand.
CALLS: list[tuple[str, dict[str, Any], str | None]] = [
    ("/generate", {"text": "hi"}, "sampling_params"),
    ("/v1/completions", {"prompt": "hi"}, None),
    ("/v1/chat/completions", {"messages": HI, "logprobs": True}, None),
    ("/v1/responses", {"input": "hi"}, None),
    ("/v1/messages", {"messages": HI, "max_tokens": 9}, None),
    ("/api/chat", {"messages": HI, "stream": False}, "options"),
]
# Their ranges depend on other fields or on settings, or many answers are not worth their time.
ENTANGLED = {"min_new_tokens", "min_tokens", "best_of", "n", "max_thinking_tokens"}

CONTEXT = NativeEngine(lambda request: [*b"hi", IM_END]).context(allow_auto_truncate=True)
ENDPOINTS = all_endpoints(CONTEXT)
PAGE = openapi_document(ENDPOINTS, CONTEXT.settings.server)


def schema_of(path: str) -> dict[str, Any]:
    reference = PAGE["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**reference, "components": PAGE["components"]}


def ranged(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, what the page says of it) wherever a range is given."""
    if isinstance(schema, list):
        for part in schema:
            yield from ranged(part, name)
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield from ranged(PAGE["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], name)
        if "maximum" in schema:
            yield name, schema
        for part in ("anyOf", "items"):
            yield from ranged(schema.get(part, []), name)
        for field, inner in schema.get("properties", {}).items():
            yield from ranged(inner, field)


@pytest.mark.parametrize(("path", "base", "under"), CALLS)
def test_the_page_tells_the_ranges_that_hold(path: str, base: dict[str, Any], under: str | None) -> None:
    schema = schema_of(path)
    validator = jsonschema_rs.Draft202012Validator(schema)
    found = [(name, limits) for name, limits in ranged(schema) if name not in ENTANGLED]
    assert len({name for name, _ in found}) > 3

    async def go() -> None:
        app = App(ENDPOINTS, CONTEXT.settings.server)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bough") as http:
            for name, limits in found:
                low = limits["minimum" if "minimum" in limits else "exclusiveMinimum"]
                for value in (low - 1, low, 0, 1, 1.0, limits["maximum"], limits["maximum"] + 1, None):
                    body = {**base, **({under: {name: value}} if under else {name: value})}
                    if value is None and name in base:  # what is required may not be left out
                        continue
                    reply = await http.post(path, json=body)
                    assert (reply.status_code == 200) == validator.is_valid(body), (name, value, reply.text)

    asyncio.run(go())


def test_fields_without_a_feature_may_be_null_on_the_page_as_in_fact() -> None:
    validator = jsonschema_rs.Draft202012Validator(schema_of("/generate"))
    assert validator.is_valid({"text": "hi", "sampling_params": {"regex": None, "custom_params": None}})
    assert validator.is_valid({"text": "hi", "sampling_params": {"regex": "a+"}})
    assert validator.is_valid({"text": "hi", "sampling_params": {"json_schema": {"type": "object"}}})
    assert not validator.is_valid({"text": "hi", "sampling_params": {"custom_params": 5}})


def test_the_page_names_the_media_types_of_answers() -> None:
    def types_of(path: str, method: str = "post") -> set[str]:
        return set(PAGE["paths"][path][method]["responses"]["200"]["content"])

    for path in ("/api/chat", "/api/generate"):
        assert types_of(path) == {"application/json", "application/x-ndjson"}
    assert types_of("/v1/chat/completions") == {"application/json", "text/event-stream"}
    assert types_of("/v1/loads", "get") == {"application/json", "text/plain"}


def test_the_page_has_the_bodies_that_handlers_read_by_themselves() -> None:
    binary = {"type": "string", "format": "binary"}

    def fields_of(path: str, media: str) -> dict[str, Any]:
        reference: str = PAGE["paths"][path]["post"]["requestBody"]["content"][media]["schema"]["$ref"]
        found: dict[str, Any] = PAGE["components"]["schemas"][reference.rsplit("/", 1)[1]]
        return found

    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        form = fields_of(path, "multipart/form-data")
        assert form["required"] == ["file"] and form["properties"]["file"] == binary
        assert {"language", "prompt", "temperature", "response_format", "stream", "model"} < form["properties"].keys()
        assert "translate" not in form["properties"], "the route says it"
    tensors = "/update_weights_from_tensor"
    assert fields_of(tensors, "application/json")["required"] == ["serialized_named_tensors"]
    raw = PAGE["paths"][tensors]["post"]["requestBody"]["content"]["application/octet-stream"]
    assert raw == {"schema": binary}


def test_every_route_that_takes_a_post_says_what_it_takes() -> None:
    silent = [
        path for path, methods in PAGE["paths"].items() if "requestBody" not in methods.get("post", {"requestBody": 0})
    ]
    assert silent == ["/v1/responses/{id}/cancel"]


@pytest.mark.parametrize(
    ("keys", "locked"),
    [
        ({}, []),
        ({"api_key": "api"}, ["/generate", "/flush_cache", "/update_weights_from_disk"]),
        ({"admin_api_key": "admin"}, ["/flush_cache", "/update_weights_from_disk"]),
        ({"api_key": "api", "admin_api_key": "admin"}, ["/generate", "/flush_cache", "/update_weights_from_disk"]),
    ],
)
def test_the_page_tells_which_routes_need_a_key(keys: dict[str, str], locked: list[str]) -> None:
    paths = openapi_document(ENDPOINTS, ServerSettings(**keys))["paths"]
    asked = ("/generate", "/flush_cache", "/update_weights_from_disk")
    assert [path for path in asked if "security" in paths[path]["post"]] == locked
    assert "security" not in paths["/health"]["get"]
