"""The control plane over HTTP: workers come, pass their checks, drain, leave; models and policies."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import pytest

from bough.core.errors import BoughError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway.launching import LocalEngines
from tests.fakes.gateways import desk, until
from tests.fakes.workers import FakeWorker, workers


def test_workers_are_added_listed_shown_and_removed() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk() as d:
            assert await d.get("/workers") == (200, {"workers": [], "total": 0})
            assert (await d.get("/readiness"))[0] == 503
            assert (await d.get("/liveness"))[0] == 200
            status, added = await d.post("/workers", {"url": fake.url + "/", "api_key": "secret"})
            assert status == 202 and re.fullmatch(r"[\w-]+", added["id"])
            assert (await d.post("/workers", {"url": fake.url}))[1]["id"] == added["id"]
            await until(lambda: d.gateway.registry.available(None))
            status, shown = await d.get(f"/workers/{added['id']}")
            assert status == 200 and "secret" not in str(shown)
            assert shown["url"] == fake.url and shown["model_id"] == "tiny"
            assert shown["is_healthy"] and shown["state"] == "healthy" and shown["load"] == 0
            status, listed = await d.get("/workers")
            assert listed == {"workers": [shown], "total": 1}
            assert (await d.get("/readiness"))[0] == 200
            assert (await d.call("DELETE", f"/workers/{added['id']}"))[0] == 200
            assert (await d.get(f"/workers/{added['id']}"))[0] == 404
            assert (await d.call("DELETE", f"/workers/{added['id']}"))[0] == 404
            assert (await d.get("/workers"))[1]["total"] == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "word"), [({"url": "no url at all"}, "url"), ({"url": 5}, "url"), ({}, "url"), ({"url": "ftp://x"}, "url")]
)
def test_a_url_that_is_none_is_refused(body: dict[str, Any], word: str) -> None:
    async def main() -> None:
        async with desk() as d:
            status, answer = await d.post("/workers", body)
            assert status == 400 and word in answer["error"]["message"].lower()

    asyncio.run(main())


def test_a_worker_gets_nothing_before_it_has_passed_and_after_it_has_failed() -> None:
    async def main() -> None:
        sick = FakeWorker(health=503)
        async with workers(FakeWorker(), sick) as (good, _), desk(good, sick, healthy=1) as d:
            for _ in range(4):
                assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 200
            assert len(good.requests) == 4 and not sick.requests
            states = {w["url"]: w["state"] for w in (await d.get("/workers"))[1]["workers"]}
            assert states == {good.url: "healthy", sick.url: "starting"}
            sick.health, good.health = 200, 500
            await until(lambda: [w.url for w in d.gateway.registry.available(None)] == [sick.url])
            assert (await d.post("/v1/completions", {"prompt": "x"}))[1]["port"] == sick.port
            states = {w["url"]: w["state"] for w in (await d.get("/workers"))[1]["workers"]}
            assert states[good.url] == "unhealthy"

    asyncio.run(main())


def test_draining_lets_a_stream_finish_and_sends_nothing_more() -> None:
    async def main() -> None:
        async with workers(FakeWorker(pause_s=0.02), FakeWorker()) as (one, two), desk(one, two) as d:
            streams = [asyncio.create_task(d.stream({"prompt": "x", "max_tokens": 20})) for _ in range(2)]
            await until(lambda: one.running)
            worker = next(w for w in d.gateway.registry if w.url == one.url)
            status, shown = await d.post(f"/workers/{worker.id}/drain")
            assert status in (200, 202) and shown["state"] == "draining"
            for _ in range(4):
                assert (await d.post("/v1/completions", {"prompt": "x"}))[1]["port"] == two.port
            assert all(raw.endswith(b"data: [DONE]\n\n") for raw in await asyncio.gather(*streams))
            shown = (await d.get(f"/workers/{worker.id}"))[1]
            assert (shown["state"], shown["load"]) == ("draining", 0)
            assert one.aborted == 0

    asyncio.run(main())


def test_models_are_routed_by_name_and_an_unknown_one_is_told_the_others() -> None:
    async def main() -> None:
        async with workers(FakeWorker("red"), FakeWorker("org/blue")) as (red, blue), desk(red, blue) as d:
            for _ in range(3):
                assert (await d.post("/v1/completions", {"model": "red", "prompt": "x"}))[1]["port"] == red.port
                assert (await d.post("/v1/completions", {"model": "org/blue", "prompt": "x"}))[1]["port"] == blue.port
            status, answer = await d.post("/v1/chat/completions", {"model": "green", "messages": []})
            assert status == 404 and "red" in answer["error"]["message"] and "org/blue" in answer["error"]["message"]
            listed = (await d.get("/v1/models"))[1]
            assert [entry["id"] for entry in listed["data"]] == ["org/blue", "red"]
            assert (await d.get("/v1/models/org/blue"))[1]["id"] == "org/blue"
            assert (await d.get("/v1/models/green"))[0] == 404

    asyncio.run(main())


def test_workers_of_one_model_decide_about_other_names_and_adapters_go_to_their_model() -> None:
    async def main() -> None:
        async with workers(FakeWorker("red"), FakeWorker("red")) as fakes, desk(*fakes) as d:
            for name in ("default", "red:fox", "fox"):
                assert (await d.post("/v1/completions", {"model": name, "prompt": "x"}))[0] == 200
            sent = {body["model"] for fake in fakes for path, _, body in fake.requests if path == "/v1/completions"}
            assert sent == {"default", "red:fox", "fox"}
            assert set(d.gateway.policies._policies) <= {None, "red"}, "names that clients make up have no policy"
        async with workers(FakeWorker("red"), FakeWorker("blue")) as (red, blue), desk(red, blue) as d:
            for _ in range(3):
                assert (await d.post("/v1/completions", {"model": "red:fox", "prompt": "x"}))[1]["port"] == red.port
            for name in ("default", "green:fox", "fox"):
                assert (await d.post("/v1/completions", {"model": name, "prompt": "x"}))[0] == 404

    asyncio.run(main())


def test_a_models_policy_changes_at_run_time() -> None:
    async def main() -> None:
        async with desk() as d:
            assert (await d.get("/policies"))[1] == {"default": "round_robin", "models": {}}
            status, shown = await d.call("PUT", "/policies", json={"model": "red", "policy": "random"})
            assert status == 200 and shown["models"] == {"red": "random"}
            status, answer = await d.call("PUT", "/policies", json={"model": "red", "policy": "guess"})
            assert status == 400 and "round_robin" in answer["error"]["message"]
            assert (await d.get("/policies"))[1]["models"] == {"red": "random"}

    asyncio.run(main())


def test_a_worker_without_health_and_information_serves_any_model_it_lists() -> None:
    class Plain(FakeWorker):
        async def _answer(self, request: Any) -> Any:
            from aiohttp import web

            if request.path in ("/health", "/server_info", "/v1/loads"):
                return web.Response(status=404, text="what?")
            return await super()._answer(request)

    async def main() -> None:
        async with workers(Plain("foreign")) as (fake,), desk(fake) as d:
            assert (await d.post("/v1/completions", {"model": "foreign", "prompt": "x"}))[0] == 200
            assert (await d.get("/workers"))[1]["workers"][0]["capacity"] is None

    asyncio.run(main())


def test_methods_and_paths_that_do_not_exist_are_told() -> None:
    async def main() -> None:
        async with desk() as d:
            assert (await d.call("PATCH", "/workers"))[0] == 405
            assert (await d.get("/nowhere"))[0] == 404
            assert (await d.get("/workers/unknown"))[0] == 404

    asyncio.run(main())


def test_a_worker_that_was_drained_is_let_in_again() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            worker = next(iter(d.gateway.registry))
            assert (await d.post(f"/workers/{worker.id}/drain"))[1]["state"] == "draining"
            assert (await d.post("/workers", {"url": fake.url}))[1]["state"] == "healthy"

    asyncio.run(main())


def test_an_engine_whose_worker_is_removed_ends_and_one_that_was_drained_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeps = lambda engines, number: ([sys.executable, "-c", "import time; time.sleep(600)"], {})  # noqa: E731
    monkeypatch.setattr(LocalEngines, "_command", sleeps)

    async def main() -> None:
        async with desk() as d:
            engines = LocalEngines(GatewaySettings(launch=2), d.gateway.registry, pytest.fail)
            engines.open()
            one, two = d.gateway.registry
            try:
                await until(lambda: one.pid is not None and two.pid is not None)
                d.gateway.registry.drain(one)
                await engines.restart(one)
                await until(lambda: one.restarts == 1 and not one.draining)
                await d.call("DELETE", f"/workers/{two.id}")
                process = engines._engines[1].process
                assert process is not None
                await until(lambda: process.returncode is not None)
                await asyncio.sleep(0.7)  # longer than the first pause before a restart
                assert engines._engines[1].process is process
            finally:
                await engines.close()

    asyncio.run(main())


@pytest.mark.parametrize(("code", "known"), [(2, False), (1, False), (2, True), (7, False)])
def test_an_engine_that_complains_before_any_was_ready_is_told_of_and_not_started_again(
    code: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = lambda engines, number: ([sys.executable, "-c", f"raise SystemExit({code})"], {})  # noqa: E731
    monkeypatch.setattr(LocalEngines, "_command", ends)

    async def main() -> None:
        async with desk() as d:
            told: list[BoughError] = []
            engines = LocalEngines(GatewaySettings(launch=1), d.gateway.registry, told.append)
            engines.open()
            (worker,) = d.gateway.registry
            worker.ever_healthy = known
            try:
                if code in (1, 2) and not known:
                    await until(lambda: told)
                    assert f"exit code {code}" in str(told[0])
                    assert worker.restarts == 1
                else:
                    await until(lambda: worker.restarts == 2)
                    assert not told
            finally:
                await engines.close()

    asyncio.run(main())


def test_loads_are_those_of_all_workers_whatever_their_model() -> None:
    class Strict(FakeWorker):
        async def _answer(self, request: Any) -> Any:
            from aiohttp import web

            if request.path == "/v1/loads" and "include=wrong" in request.query_string:
                return web.json_response({"error": {"message": "include must be some of core"}}, status=400)
            return await super()._answer(request)

    async def main() -> None:
        async with workers(Strict("red"), Strict("blue")) as (red, blue), desk(red, blue) as d:
            ids = {worker.url: worker.id for worker in d.gateway.registry}
            red.running = 3
            status, answer = await d.get("/v1/loads")
            assert status == 200 and answer["dp_rank_count"] == 2
            loads = {load["worker"]: load["num_running_reqs"] for load in answer["loads"]}
            assert loads == {ids[red.url]: 3, ids[blue.url]: 0}
            status, answer = await d.get("/v1/loads?include=wrong")
            assert status == 400 and "include" in answer["error"]["message"]
            worker = d.gateway.registry.get(ids[red.url])
            assert worker is not None
            d.gateway.registry.drain(worker)
            assert [load["worker"] for load in (await d.get("/v1/loads"))[1]["loads"]] == [ids[blue.url]]

    asyncio.run(main())
