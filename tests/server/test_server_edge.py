"""What holds for every route: keys, ids, phases, origins, prefixes, the page that describes them all."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from typing import Any

import httpx
import pytest

from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.core.settings import Settings
from bough.observability.logs import set_up_logging
from bough.server.app import App, Front, Phase
from bough.server.endpoint import Endpoint, Keys, json_response
from bough.server.errors import (
    Failure,
    HttpError,
    anthropic_shape,
    failure_of,
    native_shape,
    ollama_shape,
    openai_shape,
    set_field_names,
)
from bough.server.http import curl_text, welcome_text
from bough.server.protocols import all_endpoints
from tests.server.native_engine import NativeEngine, open_server


def get(path: str, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with open_server(NativeEngine(lambda message: [97]), **settings) as http:
            return await http.get(path, headers=headers)

    return asyncio.run(go())


API, ADMIN = {"authorization": "Bearer api"}, {"x-api-key": "admin"}
NONE: dict[str, str] = {}


@pytest.mark.parametrize(
    ("keys", "path", "sent", "status"),
    [
        ({}, "/model_info", NONE, 200),
        ({"api_key": "api"}, "/model_info", NONE, 401),
        ({"api_key": "api"}, "/model_info", API, 200),
        ({"api_key": "api"}, "/model_info", {"x-api-key": "api"}, 200),
        ({"api_key": "api"}, "/model_info", {"x-api-key": "apix"}, 401),
        ({"api_key": "api"}, "/model_info", {"authorization": "Basic api"}, 401),
        ({"api_key": "api"}, "/model_info", {"x-api-key": ""}, 401),
        ({"api_key": "api"}, "/flush_cache", API, 200),
        ({"api_key": "api"}, "/health", NONE, 200),
        ({"api_key": "api"}, "/v1/models", NONE, 401),
        ({"api_key": "api", "admin_api_key": "admin"}, "/flush_cache", API, 401),
        ({"api_key": "api", "admin_api_key": "admin"}, "/flush_cache", ADMIN, 200),
        ({"api_key": "api", "admin_api_key": "admin"}, "/model_info", API, 200),
        ({"admin_api_key": "admin"}, "/model_info", NONE, 200),
        ({"admin_api_key": "admin"}, "/flush_cache", NONE, 401),
    ],
)
def test_keys(keys: dict[str, str], path: str, sent: dict[str, str], status: int) -> None:
    reply = get(path, sent, **keys)
    assert reply.status_code == status
    if status == 401:
        assert "api" not in re.sub("API|api-key", "", reply.json()["error"]["message"])
        assert reply.headers["www-authenticate"] == "Bearer"


def test_a_refusal_names_the_key_that_would_do() -> None:
    refused = get("/flush_cache", NONE, api_key="api").json()["error"]["message"]
    assert refused.startswith("This route needs the API key: none was sent.")
    refused = get("/flush_cache", API, api_key="api", admin_api_key="admin").json()["error"]["message"]
    assert refused.startswith("This route needs the admin key: the one sent is wrong.")


def test_an_empty_key_is_none() -> None:
    for sent in ((b"x-api-key", b""), (b"authorization", b"Basic zz"), (b"authorization", b"Bearer ")):
        with pytest.raises(HttpError, match="none was sent"):
            Keys("", None).check("api", [sent])


def test_a_request_keeps_its_id_also_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert get("/health", {"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(get("/health", {"X-Request-Id": "bad id"}).headers["x-request-id"]) == 32
    set_up_logging("server", "info")
    get("/health", {"X-Request-Id": "mine-2"}, log_requests=True)
    logging.getLogger("bough.test").info("outside")
    inside, outside = capsys.readouterr().err.splitlines()
    assert re.search(r" I server: \[mine-2\] GET /health 200 in [\d.]+ ms$", inside) and outside.endswith(": outside")


def test_a_path_cannot_begin_a_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("server", "info")
    get("/a%0A00:00:00%20E%20server:%20forged", log_requests=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert "GET /a%0A00%3A00%3A00%20E%20server%3A%20forged 404 in " in line


def test_until_it_is_open_and_after_it_is_told_to_stop_everybody_gets_a_503() -> None:
    async def ok(request: Any) -> Any:
        return json_response({})

    async def go() -> None:
        front = Front(root_path="/llm")
        paths = ("/health", "/metrics")
        settings = Settings.from_flat({"root_path": "/llm"}).server
        app = App([Endpoint(path=p, methods=("GET",), handler=ok, summary="") for p in paths], settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://bough") as http:
            assert (await http.get("/metrics")).status_code == 503
            loading = await http.get("/health")
            assert loading.status_code == 503 and "loading" in loading.text and loading.headers["retry-after"]
            assert (await http.get("/v1/models")).json()["error"]["type"] == "server_error"
            assert (await http.get("/llm/v1/models")).json()["error"]["type"] == "server_error"
            front.open(app)
            assert (await http.get("/health")).status_code == 200
            front.phase = Phase.DRAINING
            assert "shutting down" in (await http.get("/health")).text
            assert (await http.get("/metrics")).status_code == (await http.get("/llm/metrics")).status_code == 200
            assert await front.drained(0.0) and front.active == 0

    asyncio.run(go())


def test_a_defect_is_a_500_that_says_no_more() -> None:
    async def broken(request: Any) -> Any:
        raise ZeroDivisionError("secret details")

    async def go() -> httpx.Response:
        app = App([Endpoint(path="/x", methods=("GET",), handler=broken, summary="")], Settings().server)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bough") as http:
            return await http.get("/x")

    reply = asyncio.run(go())
    assert reply.status_code == 500 and "secret" not in reply.text


def test_origins_are_refused_unless_allowed() -> None:
    asked = {"origin": "http://page.example"}
    refused = get("/health", asked)
    assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    allowed = get("/health", asked, allowed_origins="http://other.example, http://page.example")
    assert allowed.headers["access-control-allow-origin"] == "http://page.example"
    assert get("/health", asked, allowed_origins="*").headers["access-control-allow-origin"] == "*"


def test_a_prefix_may_be_cut_off_by_the_proxy_or_not() -> None:
    assert get("/llm/health", root_path="/llm").status_code == 200
    assert get("/health", root_path="/llm/").status_code == 200
    assert get("/llmx/health", root_path="/llm").status_code == 404


def test_every_protocol_has_its_own_errors() -> None:
    failure = Failure(429, "full", "QueueFullError", "n")
    assert native_shape(failure)["error"]["retryable"] is True and native_shape(failure)["error"]["param"] == "n"
    assert openai_shape(failure)["error"] == {
        "message": "full",
        "type": "rate_limit_error",
        "param": "n",
        "code": "rate_limit_exceeded",
    }
    assert anthropic_shape(failure) == {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}
    assert ollama_shape(failure) == {"error": "full"}


def test_the_page_describes_every_route_and_nothing_else() -> None:
    endpoints = all_endpoints(NativeEngine(lambda message: [97]).context())
    page = get("/openapi.json").json()
    described = {(path, method.upper()) for path, methods in page["paths"].items() for method in methods}
    assert described == {(re.sub(r":\w+}", "}", e.path), method) for e in endpoints for method in e.methods}
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', get("/openapi.json").text))
    assert references <= page["components"]["schemas"].keys()
    names = [operation["operationId"] for methods in page["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))
    assert "openapi.json" in get("/docs").text and "http://" not in get("/docs").text


def test_the_call_to_paste_never_shows_a_key() -> None:
    server = Settings.from_flat({"api_key": "s3cret", "uds": "/run/a b.sock"}).server
    text = curl_text("http+unix:///run/a b.sock", server)
    assert "Bearer ${BOUGH_API_KEY:-YOUR_KEY}" in text
    assert curl_text("https://h", Settings.from_flat({"ssl_certfile": "c.pem"}).server).startswith("curl -k https://h/")
    assert "s3cret" not in text and "--unix-socket '/run/a b.sock' http://localhost/generate" in text


@pytest.mark.parametrize(
    ("settings", "named"), [({}, True), ({"disable_ui": True}, False), ({"uds": "/run/b.sock"}, False)]
)
def test_the_first_line_names_the_page_where_a_browser_reaches_it(settings: dict[str, Any], named: bool) -> None:
    first = welcome_text("m", "http://h:1", Settings.from_flat(settings).server, 1.0, {}).splitlines()[0]
    assert first == f"m is served at http://h:1 (ready after 1.0 s).{' Its page: http://h:1/ui.' if named else ''} Try:"


def test_errors_name_the_fields_of_the_protocol_and_leave_prose_alone() -> None:
    def told(message: str, field: str) -> tuple[str, str | None]:
        set_field_names({"prompt": "text", "max_new_tokens": "max_tokens"})
        failure = failure_of(RequestError(message, field=field))
        set_field_names({})
        return failure.message, failure.field

    assert told("prompt must be a string.", "prompt") == ("text must be a string.", "text")
    assert told("n or max_new_tokens is wrong.", "n") == ("n or max_tokens is wrong.", "n")
    assert told("start must be a prompt position.", "start") == ("start must be a prompt position.", "start")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "a"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/v1/responses", {"input": "a"}, "input"),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_refusals_name_the_protocols_fields(
    path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    async def go() -> httpx.Response:
        refusal = FinishAbort("input_ids: token id 9 is outside the vocabulary.", field="input_ids")
        async with open_server(NativeEngine(lambda message: refusal)) as http:
            return await http.post(path, json={**body, "model": "m", "stream": stream})

    error = asyncio.run(go()).json()["error"]
    assert error["message"] == f"{field}: token id 9 is outside the vocabulary."
    assert error.get("param", field) == field  # Anthropic's errors have none


def test_without_a_tokenizer_chats_are_sent_to_where_ids_are_taken() -> None:
    async def go() -> httpx.Response:
        engine = NativeEngine(lambda message: [97])
        context = dataclasses.replace(engine.context(), tokenizer=None)
        app = App(all_endpoints(context), context.settings.server)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bough") as http:
            return await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})

    error = asyncio.run(go()).json()["error"]
    assert "send token ids to /generate" in error["message"] and error["param"] == "messages"
