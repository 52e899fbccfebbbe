"""The data plane: what passes to a worker and back, and what does not."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.gateways import desk, until
from tests.fakes.workers import FakeWorker, text_of, tokens_of, workers


def test_bodies_pass_as_they_came_and_paths_with_their_query() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            body = {"model": "tiny", "prompt": "x", "unheard_of": {"a": [1, None]}, "max_tokens": 2}
            status, answer = await d.post("/v1/completions", body)
            assert status == 200 and answer["choices"][0]["text"] == text_of(tokens_of("x", 2))
            assert fake.requests[-1][2] == body
            _, answer = await d.get("/v1/files/a%2Fb?limit=3&x=%20y")
            assert answer["query"] == "limit=3&x=%20y" and answer["path"] == "/v1/files/a/b"
            _, answer = await d.post("/tokenize", {"prompt": "x"})
            assert answer["path"] == "/tokenize"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_stream_is_what_the_worker_says_without_the_gateways_comments(path: str, resumes: bool) -> None:
    async def main() -> None:
        async with workers(FakeWorker(resumes=resumes)) as (fake,), desk(fake) as d:
            body = {"prompt": "x", "stream": True, "max_tokens": 5}
            through = await d.stream(body, path)
            async with d.client.post(fake.url + path, json=body) as response:
                direct = await response.read()
            number = len(fake.requests)
            assert through.replace(f"-{number - 1}".encode(), b"") == direct.replace(f"-{number}".encode(), b"")

    asyncio.run(main())


def test_headers_that_pass_and_headers_that_do_not() -> None:
    async def main() -> None:
        async with (
            workers(FakeWorker(api_key="upstream-secret")) as (fake,),
            desk(fake, api_keys=("client-secret", "other"), worker_api_key="upstream-secret") as d,
        ):
            headers = {
                "Authorization": "Bearer client-secret",
                "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                "X-Forwarded-For": "1.2.3.4",
                "X-Forwarded-Proto": "https",
                "X-Own": "kept",
                "X-Request-Id": "abc",
                "Connection": "keep-alive, X-Hop",
                "X-Hop": "dropped",
                "TE": "trailers",
                "Proxy-Authorization": "Basic x",
            }
            async with d.client.post(d.url + "/v1/completions", json={"prompt": "x"}, headers=headers) as response:
                assert response.status == 200
                assert response.headers.getall("X-Request-Id") == ["abc"]
                assert "upstream-secret" not in await response.text()
            seen = fake.requests[-1][1]
            assert seen["authorization"] == "Bearer upstream-secret" and "client-secret" not in str(seen)
            assert seen["traceparent"] == headers["traceparent"]
            assert (seen["x-forwarded-for"], seen["x-forwarded-proto"], seen["x-own"]) == ("1.2.3.4", "https", "kept")
            assert seen["x-request-id"] == "abc"
            assert not {"x-hop", "te", "proxy-authorization"} & seen.keys()
            assert int(seen["content-length"]) > 0

    asyncio.run(main())


def test_keys_guard_the_api_and_management() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, api_keys=("k1", "k2")) as d:
            status, answer = await d.get("/v1/models")
            assert status == 401 and "the API key: none was sent" in answer["error"]["message"]
            assert (await d.get("/v1/models", headers={"Authorization": "Bearer wrong"}))[0] == 401
            assert (await d.get("/v1/models", headers={"Authorization": "Bearer k2"}))[0] == 200
            assert (await d.get("/v1/models", headers={"x-api-key": "k1"}))[0] == 200
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 401
            assert not fake.requests
            for path in ("/liveness", "/readiness", "/metrics", "/health"):
                assert (await d.get(path))[0] == 200
        async with desk(api_keys=("k1",), admin_api_key="root") as d:
            status, answer = await d.get("/workers", headers={"x-api-key": "k1"})
            assert status == 401 and "the admin key: the one sent is wrong" in answer["error"]["message"]
            assert (await d.get("/workers", headers={"x-api-key": "root"}))[0] == 200

    asyncio.run(main())


def test_a_path_that_is_nobodys_names_those_that_are_passed_on() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            status, answer = await d.get("/nowhere")
            assert status == 404 and not fake.requests
            assert all(path in answer["error"]["message"] for path in ("/v1/*", "/api/*", "/generate", "/docs"))

    asyncio.run(main())


def test_a_body_over_the_limit_is_refused() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, max_body_mb=1) as d:
            assert (await d.post("/v1/completions", {"prompt": "x" * (1 << 20)}))[0] == 413

            async def chunks():  # type: ignore[no-untyped-def]
                for _ in range(20):
                    yield b" " * 100_000

            assert (await d.call("POST", "/v1/completions", data=chunks()))[0] == 413
            assert not fake.requests
            assert (await d.post("/v1/completions", {"prompt": "x" * 1_000_000}))[0] == 200

    asyncio.run(main())


def test_errors_of_workers_in_plain_text_get_openais_shape() -> None:
    async def main() -> None:
        async with workers(FakeWorker(mode="bad_request")) as (fake,), desk(fake, retry_max_retries=1) as d:
            status, answer = await d.post("/v1/completions", {"prompt": "x"})
            assert status == 400 and answer["error"]["message"] == "that is no request"
            assert answer["error"]["type"] == "invalid_request_error" and len(fake.requests) == 1
            fake.mode = "plain_error"
            status, answer = await d.post("/v1/completions", {"prompt": "x"})
            assert status == 500 and answer["error"]["message"] == "out of cheese"
            fake.mode = "error"
            assert await d.post("/v1/completions", {"prompt": "x"}) == (500, {"error": {"message": "boom"}})

    asyncio.run(main())


def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    async def main() -> None:
        async with workers(FakeWorker(pause_s=0.01)) as (fake,), desk(fake) as d:
            for stream in (True, False):
                fake.mode = "ok" if stream else "slow"
                body = {"prompt": "x", "stream": stream, "max_tokens": 100_000}
                response = asyncio.create_task(d.client.post(d.url + "/v1/completions", json=body))
                await until(lambda: fake.running == 1)
                if stream:
                    await (await response).content.readany()
                    (await response).close()
                else:
                    response.cancel()
                await until(lambda: fake.running == 0)
                await until(lambda: sum(w.load for w in d.gateway.registry) == 0 and not d.gateway.dispatch.active)
            assert fake.aborted == 2

    asyncio.run(main())


def test_stored_responses_stick_to_their_worker() -> None:
    async def main() -> None:
        async with workers(FakeWorker(), FakeWorker(), FakeWorker()) as fakes, desk(*fakes) as d:
            names = [(await d.post("/v1/responses", {"input": str(n)}))[1]["id"] for n in range(6)]
            for name in names:
                for _ in range(3):
                    status, found = await d.get(f"/v1/responses/{name}")
                    assert status == 200 and name.startswith(f"resp_{found['port']}_")
            strange = f"resp_{fakes[2].port}_99"  # made through another gateway
            assert (await d.get(f"/v1/responses/{strange}"))[1]["port"] == fakes[2].port
            for _ in range(3):
                await d.post("/v1/responses", {"input": "more", "previous_response_id": names[0]})
            port = int(names[0].split("_")[1])
            later = [fake.port for fake in fakes for _, _, body in fake.requests if body.get("previous_response_id")]
            assert later == [port] * 3

    asyncio.run(main())


def test_metrics_tell_what_was_expected_and_found_in_caches() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            await d.post("/v1/completions", {"model": "tiny", "prompt": "x"})
            await d.stream({"model": "tiny", "prompt": "x"})
            page = (await d.get("/metrics"))[1].decode()
            assert 'requests_total{model="tiny",path="/v1/completions",status="200"} 2.0' in page
            assert "bough_gateway_prompt_tokens_total 10.0" in page
            assert "bough_gateway_cached_tokens_total 5.0" in page
            assert f'breaker_state{{worker="{fake.url}"}} 0.0' in page

    asyncio.run(main())


def test_the_access_log_is_lines_of_json_without_contents(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, access_log=True) as d:
            await d.post("/v1/completions", {"model": "tiny", "prompt": "private"}, headers={"X-Request-Id": "r1"})

    asyncio.run(main())
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert len(lines) == 1 and lines[0]["request_id"] == "r1" and lines[0]["status"] == 200
    assert lines[0]["attempts"] == 1 and "private" not in str(lines)


EMPTY = (
    *("/tokenize", "/detokenize", "/v1/tokenize", "/invocations", "/vertex_generate", "/api/chat", "/api/generate"),
    *("/rerank", "/encode", "/classify", "/parse_function_call", "/separate_reasoning", "/v1/messages/count_tokens"),
)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", b"question 1", "text/plain"),
        ("/v1/chat/completions", b'{"messages": [', "application/json"),
        ("/generate", b"[1, 2]", "application/x-www-form-urlencoded"),
        ("/generate", b"", "application/json"),
        *((path, b"", "application/json") for path in EMPTY),
        ("/v1/messages", b'{"model": "tiny"} x', "application/json"),
        ("/v1/unheard_of", b"{", "application/json; charset=utf-8"),
        ("/v1/completions", b'{"prompt": "' + b"x" * (2 << 20), "application/json"),
        ("/v1/completions", b'{"prompt": "' + b"x" * (2 << 20) + b'"}}', "application/json"),
    ],
)
def test_a_body_that_is_no_json_does_not_reach_a_worker(path: str, body: bytes, kind: str) -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, cb_failure_threshold=1) as d:
            status, answer = await d.call("POST", path, data=body, headers={"content-type": kind})
            assert status == 400 and "not a valid JSON object" in json.dumps(answer) and not fake.requests
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 200

    asyncio.run(main())


def test_what_needs_no_body_reaches_a_worker_without_one() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            for method, path in (("POST", "/v1/responses/x/cancel"), ("GET", "/get_load"), ("GET", "/api/tags")):
                await d.call(method, path)
            page = (await d.get("/metrics"))[1].decode()
            assert f'bough_gateway_attempts_total{{worker="{fake.url}"}} 3.0' in page

    asyncio.run(main())


@pytest.mark.parametrize("headers", [{"content-type": "multipart/form-data; boundary=x"}, {"content-encoding": "gzip"}])
def test_other_bodies_are_for_the_worker_to_read(headers: dict[str, str]) -> None:
    async def main() -> None:
        async with workers(FakeWorker(mode="bad_request")) as (fake,), desk(fake) as d:
            await d.call("POST", "/v1/audio/transcriptions", data=b'{"not": 1}--', headers=headers)
            metrics = (await d.get("/metrics"))[1].decode()
            assert f'bough_gateway_attempts_total{{worker="{fake.url}"}} ' in metrics

    asyncio.run(main())
