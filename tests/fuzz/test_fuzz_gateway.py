"""Schemathesis through a real gateway to a real server with a scripted engine, and noise on the gateway's own routes:
everything is answered, never with a 500, and the gateway serves afterwards as before."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.core.server_settings import ServerSettings
from bough.messages.requests import Generate
from bough.server.app import App, Front
from bough.server.http import HttpServer, open_listener, url_of
from bough.server.protocols import all_endpoints, openapi_document
from tests.fakes.gateways import desk
from tests.fakes.scripted_engine import IM_END
from tests.fakes.workers import FakeWorker
from tests.server.native_engine import NativeEngine, Play

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

PATIENCE_S = 60.0
OWN = ["/workers", "/workers/x", "/workers/x/restart", "/workers/x/drain", "/policies", "/policies/m", "/flush_cache"]
OWN += [
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/health",
    "/readiness",
    "/metrics",
    "/v1/models",
]
OWN += ["/", "/..", "/v1/../workers", "/workers/%2e%2e", "/nothing", "/workers/" + "x" * 3000]


def play(message: Generate) -> Play:
    return [*b"hi", IM_END][: message.sampling.max_new_tokens] or [IM_END]


CONTEXT = NativeEngine(play).context(max_body_mb=1)
ENDPOINTS = all_endpoints(CONTEXT)
PAGE = openapi_document(ENDPOINTS, CONTEXT.settings.server)


async def serve(started: Future[str], ending: Future[asyncio.Event]) -> None:
    """A server over the scripted engine, and a gateway before it, until told to end."""
    over = asyncio.Event()
    edge = ServerSettings(port=0)
    listener, front = open_listener(edge), Front()
    front.open(App(ENDPOINTS, CONTEXT.settings.server))
    http = HttpServer(front, listener, edge)
    serving = asyncio.create_task(http.run_here())
    worker = FakeWorker(url=url_of(listener, edge))
    try:
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(desk(worker, health_check_timeout_secs=5.0, max_body_mb=1))
            ending.set_result(over)
            started.set_result(running.url)
            await over.wait()
    except BaseException as error:
        if not started.done():
            started.set_exception(error)
        raise
    finally:
        http.leave(0)
        await serving
        listener.close()


@contextmanager
def running_gateway() -> Iterator[str]:
    started: Future[str] = Future()
    ending: Future[asyncio.Event] = Future()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(started, ending),), daemon=True)
    thread.start()
    try:
        yield started.result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(ending.result(PATIENCE_S).set)
        thread.join(PATIENCE_S)
        loop.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_gateway() as url:
        yield url
        asked = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE_S).status_code == 200


# What asks for a worker's own management is answered by the gateway for all workers, or not at all.
schema = schemathesis.openapi.from_dict(PAGE)


def no_server_error(case: Any, url: str) -> int:
    """503 is what the gateway says while no worker is in rotation, which a fuzzed pause or health route can cause."""
    response = case.call(base_url=url, timeout=PATIENCE_S)
    assert response.status_code < 500 or response.status_code in (501, 503), f"{response.status_code} {response.text}"
    return int(response.status_code)


# About ninety routes: a few hundred cases, and ten thousand.
@pytest.mark.parametrize("cases", [pytest.param(2, marks=pytest.mark.slow), pytest.param(115, marks=pytest.mark.long)])
def test_every_route_through_the_gateway(url: str, cases: int) -> None:
    routes = [result.ok() for result in schema.get_all_operations()]
    assert len(routes) > 50
    for route in routes:

        @given(case=route.as_strategy())
        @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck))
        def try_route(case: Any) -> None:
            no_server_error(case, url)

        try_route()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    ["url", "model_id", "api_key", "worker_type", "priority", "name", "policy", "model", "rid", "mode"]
)
bodies = st.binary(max_size=60) | st.dictionaries(names, values, max_size=4) | values
headers = st.dictionaries(
    st.sampled_from(
        ["content-type", "authorization", "x-smg-target-worker", "traceparent", "range", "expect", "cookie"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40).map(str.strip),
    max_size=3,
)


CLIENT = httpx.Client(timeout=PATIENCE_S, verify=False)  # plain HTTP: no certificates to read for each


def own_routes(url: str, method: str, path: str, body: Any, sent: dict[str, str]) -> int:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()  # with Infinity and NaN, which are no JSON
    response = CLIENT.request(method, url + path, headers={"content-type": "application/json", **sent}, content=content)
    assert response.status_code < 500 or response.status_code in (501, 503), f"{response.status_code} {response.text}"
    if method == "POST" and response.status_code == 202:  # a worker that was added would be asked for ever
        CLIENT.delete(f"{url}/workers/{response.json()['id']}")
    return response.status_code


ROUTES = {
    "method": st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]),
    "path": st.sampled_from(OWN)
    | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30).map("/".__add__),
    "body": bodies,
    "sent": headers,
}


@pytest.mark.parametrize(
    "cases", [pytest.param(150, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.long)]
)
def test_the_gateways_own_routes(url: str, cases: int) -> None:
    @given(**ROUTES)
    @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck))
    def try_route(method: str, path: str, body: Any, sent: dict[str, str]) -> None:
        own_routes(url, method, path, body, sent)

    try_route()


def test_what_all_workers_refuse_is_the_requests_fault(url: str) -> None:
    response = CLIENT.post(f"{url}/abort_request", json={"no such field": 1})
    assert response.status_code == 400 and list(response.json()["workers"].values()) == [400]
