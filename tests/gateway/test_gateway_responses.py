"""What clients get of workers' answers: errors, secrets, encodings; and who is asked for what was stored."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest
from aiohttp import web

from bough.gateway.responses import scrubbed
from tests.fakes.gateways import desk
from tests.fakes.workers import FakeWorker, workers

KEY = "upstream-secret"


class Answering(FakeWorker):
    """Answers everything that is asked of the model with one response."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = {}  # noqa: RUF012

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/server_info" and self.body != b"{}":
            return web.Response(body=self.body, content_type="application/json", headers=self.headers)
        return await super()._answer(request)

    async def _work(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=self.status, body=self.body, headers=self.headers)


@pytest.mark.parametrize("status", [500, 501, 505, 507, 520, 529])
def test_every_failure_of_a_server_is_one(status: int) -> None:
    async def main() -> None:
        bad = Answering()
        bad.status, bad.body = status, b'{"error": {"message": "no"}}'
        async with workers(bad, FakeWorker()) as fakes, desk(*fakes, cb_failure_threshold=2) as d:
            statuses = [(await d.post("/v1/completions", {"prompt": "x"}))[0] for _ in range(8)]
            worker = next(w for w in d.gateway.registry if w.url == bad.url)
            assert set(statuses) == {200}
            assert worker.breaker.state(0.0).name == ("CLOSED" if status == 501 else "OPEN")
            others = [Answering(), Answering()]
            for other in others:
                other.status, other.body = bad.status, bad.body
        bad.requests.clear()
        async with workers(bad, *others) as fakes, desk(*fakes, cb_failure_threshold=1) as d:
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == status
            assert sorted(len(fake.requests) for fake in fakes) == [0, 1, 1]  # the request is to blame
            assert {worker.breaker.state(0.0).name for worker in d.gateway.registry} == {"CLOSED"}
        bad.requests.clear()
        async with workers(bad) as fakes, desk(*fakes, retry_max_retries=2) as d:
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == status
            assert len(bad.requests) == (1 if status == 501 else 3)  # it would only say so again

    asyncio.run(main())


def test_a_short_key_is_known_by_how_it_is_sent() -> None:
    assert scrubbed(b"you sent Bearer abc", "abc") == b"you sent ***"
    assert scrubbed(b"abcdef", "abc") == b"abcdef"
    assert scrubbed(b"x upstream-secret", "upstream-secret") == b"x ***"


def test_keys_of_workers_stay_with_the_gateway() -> None:
    async def main() -> None:
        worker = Answering(api_key=KEY)
        worker.body = b'{"api_key": "%s", "admin_api_key": "other", "note": "it is %s"}' % (KEY.encode(), KEY.encode())
        worker.headers = {"x-note": f"key {KEY}"}
        async with workers(worker) as fakes, desk(*fakes, worker_api_key=KEY) as d:
            for path in ("/server_info", "/v1/anything"):
                async with d.client.get(d.url + path) as response:
                    body = await response.text()
                    assert response.status == 200 and "it is ***" in body
                    assert KEY not in body + str(response.headers)
                    assert path != "/server_info" or "api_key" not in body
            worker.headers = {"content-type": "text/event-stream"}
            worker.body = f'data: {{"error": "{KEY} is wrong"}}\n\n'.encode()
            assert KEY.encode() not in await d.stream({"prompt": "x"})

    asyncio.run(main())


def test_an_error_that_comes_encoded_stays_readable() -> None:
    async def main() -> None:
        worker = Answering()
        worker.status, worker.body = 400, gzip.compress(b"that is wrong")
        worker.headers = {"content-encoding": "gzip"}
        async with workers(worker) as fakes, desk(*fakes) as d:
            assert await d.post("/v1/completions", {"prompt": "x"}) == (400, b"that is wrong")
            headers = worker.requests[0][1]
            assert "accept-encoding" not in headers

    asyncio.run(main())


def test_attempts_are_counted_where_they_were_made() -> None:
    async def main() -> None:
        bad = FakeWorker(mode="error")
        async with workers(bad, FakeWorker()) as fakes, desk(*fakes) as d:
            for _ in range(4):
                await d.post("/v1/completions", {"prompt": "x"})
            page = (await d.get("/metrics"))[1].decode()
            for fake in fakes:
                name = f'bough_gateway_attempts_total{{worker="{fake.url}"}}'
                assert f"{name} {float(len(fake.requests))}" in page

    asyncio.run(main())


def test_a_response_that_another_gateway_saw_being_made_is_gone_on_with_where_it_is() -> None:
    async def main() -> None:
        fakes = [FakeWorker() for _ in range(3)]
        async with workers(*fakes), desk(*fakes) as d, desk(*fakes) as other:
            name = (await d.post("/v1/responses", {"input": "x"}))[1]["id"]
            holder = next(fake for fake in fakes if str(fake.port) in name)
            drained = next(w for w in other.gateway.registry if w.url == holder.url)
            for number in range(4):
                follow_up = {"input": "y", "previous_response_id": name}
                assert str(holder.port) in (await other.post("/v1/responses", follow_up))[1]["id"]
                if number == 2:
                    other.gateway.registry.drain(drained)
            assert (await other.get(f"/v1/responses/{name}"))[1]["port"] == holder.port

    asyncio.run(main())


def test_native_routes_of_a_server_are_the_gateways_too() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as fakes, desk(*fakes) as d:
            for path in (
                "/parse_function_call",
                "/separate_reasoning",
                "/get_load",
                "/invocations",
                "/vertex_generate",
            ):
                assert (await d.post(path, {}))[1]["path"] == path
            assert (await d.get("/ping"))[0] == 200
            assert (await d.get("/weight_version"))[1]["path"] == "/weight_version"
            for path in ("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation"):
                assert (await d.post(path, {}))[1] == {"workers": {fakes[0].url: 200}}

    asyncio.run(main())
