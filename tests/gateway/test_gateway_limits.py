"""Limits: requests at once, the queue before them, rates, time."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from bough.gateway.call import AccessLog
from bough.gateway.core import Gateway
from bough.gateway.policies import Choice, Policy, RoutingRequest, WorkerView
from bough.server.http import HttpServer
from tests.fakes.gateways import desk, until
from tests.fakes.workers import FakeWorker, workers


def test_the_queue_is_bounded_and_its_patience_too() -> None:
    async def main() -> None:
        slow = FakeWorker(mode="slow")
        settings = {"max_concurrent_requests": 1, "queue_size": 1, "queue_timeout_secs": 0.3}
        async with workers(slow) as (fake,), desk(fake, **settings) as d:
            running = asyncio.create_task(d.post("/v1/completions", {"prompt": "x"}))
            await until(lambda: fake.running == 1)
            waiting = asyncio.create_task(d.post("/v1/completions", {"prompt": "x"}))
            await until(lambda: d.gateway.dispatch.waiting == 1)
            async with d.client.post(d.url + "/v1/completions", json={"prompt": "x"}) as refused:
                assert refused.status == 429 and refused.headers["Retry-After"]
            status, answer = await waiting
            assert status == 408 and "queue-timeout" in answer["error"]["message"]
            running.cancel()
            await until(lambda: d.gateway.dispatch.active == 0)

    asyncio.run(main())


def test_those_who_wait_go_in_the_order_of_their_priority() -> None:
    async def main() -> None:
        async with workers(FakeWorker(pause_s=1.0)) as (fake,), desk(fake, max_concurrent_requests=1) as d:
            calls = [asyncio.create_task(d.post("/v1/completions", {"prompt": "first"}))]
            await until(lambda: fake.running == 1)
            for number, priority in enumerate((0, 5, 0, 9)):
                calls.append(asyncio.create_task(d.post("/v1/completions", {"prompt": number, "priority": priority})))
                await until(lambda expected=number + 1: d.gateway.dispatch.waiting == expected)
            fake.pause_s = 0.0
            assert {status for status, _ in await asyncio.gather(*calls)} == {200}
            assert [body["prompt"] for _, _, body in fake.requests] == ["first", 3, 1, 0, 2]
            assert fake.most_running == 1

    asyncio.run(main())


def test_a_worker_gets_no_more_at_once_than_its_limit() -> None:
    async def main() -> None:
        fakes = [FakeWorker(pause_s=0.01) for _ in range(2)]
        async with workers(*fakes), desk(*fakes, max_concurrent_per_worker=2) as d:
            answers = await asyncio.gather(*(d.post("/v1/completions", {"prompt": str(n)}) for n in range(20)))
            assert {status for status, _ in answers} == {200}
            assert [fake.most_running for fake in fakes] == [2, 2]

    asyncio.run(main())


def test_over_the_rate_means_refused_at_once() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, rate_limit_rps=0.01, rate_limit_burst=3) as d:
            statuses = [(await d.post("/v1/completions", {"prompt": "x"}))[0] for _ in range(5)]
            assert statuses == [200, 200, 200, 429, 429]
            async with d.client.post(d.url + "/v1/completions", json={"prompt": "x"}) as refused:
                assert int(refused.headers["Retry-After"]) >= 1
                assert (await refused.json())["error"]["type"] == "rate_limit_error"
            assert (await d.get("/workers"))[0] == 200

    asyncio.run(main())


def test_a_request_that_takes_too_long_is_ended() -> None:
    async def main() -> None:
        async with workers(FakeWorker(pause_s=0.02)) as (fake,), desk(fake, request_timeout_secs=0.2) as d:
            raw = await d.stream({"prompt": "x", "max_tokens": 100_000})
            assert b"request-timeout" in raw.splitlines()[-2]
            fake.mode = "slow"
            status, answer = await d.post("/v1/completions", {"prompt": "x"})
            assert status == 504 and "request-timeout" in answer["error"]["message"]
            await until(lambda: fake.running == 0)

    asyncio.run(main())


def test_without_workers_requests_are_told_so() -> None:
    async def main() -> None:
        async with desk() as d:
            status, answer = await d.post("/v1/completions", {"model": "x", "prompt": "x"})
            assert status == 503 and "rotation" in answer["error"]["message"]
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 503

    asyncio.run(main())


def test_one_models_queue_does_not_hold_up_another_model() -> None:
    async def main() -> None:
        fakes = [FakeWorker("red", mode="slow"), FakeWorker("blue")]
        async with workers(*fakes), desk(*fakes, max_concurrent_per_worker=1) as d:
            held = [asyncio.create_task(d.post("/v1/completions", {"model": "red", "prompt": "x"})) for _ in range(3)]
            await until(lambda: d.gateway.dispatch.waiting == 2)
            for _ in range(3):
                assert (await d.post("/v1/completions", {"model": "blue", "prompt": "x"}))[0] == 200
            for task in held:
                task.cancel()
            await until(lambda: d.gateway.dispatch.active == 0)

    asyncio.run(main())


def test_requests_wait_for_a_worker_that_is_about_to_come() -> None:
    async def main() -> None:
        fake = FakeWorker(health=503)
        async with workers(fake), desk(fake, healthy=0) as d:
            early = asyncio.create_task(d.post("/v1/completions", {"model": "tiny", "prompt": "x"}))
            await until(lambda: d.gateway.dispatch.waiting == 1)
            fake.health = 200
            assert (await early)[0] == 200

    asyncio.run(main())


def test_open_breakers_everywhere_are_told_without_the_queues_patience() -> None:
    async def main() -> None:
        bad = FakeWorker(mode="error")
        settings = {"cb_failure_threshold": 1, "retry_max_retries": 0, "queue_size": 0}
        async with workers(bad), desk(bad, **settings) as d:
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 500
            status, answer = await d.post("/v1/completions", {"prompt": "x"})
            assert status == 503 and "breaker" in answer["error"]["message"]

    asyncio.run(main())


def test_those_who_wait_for_one_model_are_not_in_the_way_of_another() -> None:
    async def main() -> None:
        busy, idle = FakeWorker(model="a", mode="slow"), FakeWorker(model="b")
        settings = {"max_concurrent_per_worker": 1, "queue_size": 1}
        async with workers(busy, idle) as fakes, desk(*fakes, **settings) as d:
            calls = [asyncio.create_task(d.post("/v1/completions", {"model": "a", "prompt": "x"})) for _ in range(2)]
            await until(lambda: d.gateway.dispatch.waiting == 1)
            assert (await d.post("/v1/completions", {"model": "b", "prompt": "x"}))[0] == 200
            assert (await d.post("/v1/completions", {"model": "a", "prompt": "x"}))[0] == 429
            for call in calls:
                call.cancel()
            await until(lambda: d.gateway.dispatch.active == 0)

    asyncio.run(main())


class FussyPolicy(Policy):
    """Fails for one prompt."""

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        if request.text.startswith("bad"):
            raise ZeroDivisionError
        return Choice(workers[0].id)

    def tick(self, now_s: float) -> None:
        raise ZeroDivisionError


def test_a_request_that_no_policy_can_place_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with workers(FakeWorker(pause_s=0.3)) as (fake,), desk(fake, max_concurrent_per_worker=1) as d:
            monkeypatch.setattr(d.gateway.policies, "of", lambda model: FussyPolicy())
            monkeypatch.setattr(d.gateway.policies, "tick", FussyPolicy().tick)
            calls = []
            for number, prompt in enumerate(("good", "bad", "good")):
                calls.append(asyncio.create_task(d.post("/v1/completions", {"prompt": prompt})))
                await until(lambda expected=number: fake.running == 1 and d.gateway.dispatch.waiting == expected)
            assert [status for status, _ in await asyncio.gather(*calls)] == [200, 500, 200]
            await asyncio.sleep(1.1)
            assert d.gateway._ticking is not None and not d.gateway._ticking.done()

    asyncio.run(main())


@pytest.mark.parametrize("prompt", [[99_999_999_999], [-5]])
def test_numbers_that_are_no_tokens_are_the_workers_to_refuse(prompt: list[int]) -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, policy="kv_events") as d:
            assert (await d.post("/v1/completions", {"prompt": prompt}))[0] == 200
            deep = b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}"
            assert (await d.call("POST", "/v1/chat/completions", data=deep))[0] == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    "options", [{"eviction_interval_secs": "x"}, {"cache_threshold": "x"}, {"name": "x"}, {"max_tree_size": 1.5}]
)
def test_options_of_the_wrong_kind_are_refused(options: dict[str, Any]) -> None:
    async def main() -> None:
        async with desk() as d:
            body = {"policy": "cache_aware", "options": options}
            status, answer = await d.call("PUT", "/policies", json=body)
            assert status == 400 and next(iter(options)) in answer["error"]["message"]

    asyncio.run(main())


def test_requests_that_are_refused_are_counted_and_logged() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, api_keys=("k",), rate_limit_rps=0.01) as d:
            d.gateway.log = AccessLog(True, lines := io.StringIO())
            headers = {"x-api-key": "k"}
            calls = [await d.post("/v1/completions", {"prompt": "x"}, headers=h) for h in ({}, headers, headers)]
            assert [status for status, _ in calls] == [401, 200, 429]
            logged = [json.loads(line) for line in lines.getvalue().splitlines()]
            assert [line["status"] for line in logged] == [401, 200, 429] and logged[2]["client"] == "key 1"
            page = (await d.get("/metrics"))[1].decode()
            for status in (401, 200, 429):
                assert any(f'path="/v1/completions",status="{status}"}} 1.0' in line for line in page.splitlines())

    asyncio.run(main())


def test_names_that_clients_make_up_have_no_policy_of_their_own() -> None:
    class Silent(FakeWorker):
        """Takes any model: it tells of none."""

        async def _answer(self, request: web.Request) -> web.StreamResponse:
            if request.path in ("/v1/models", "/server_info"):
                return web.Response(status=404)
            return await super()._answer(request)

    async def main() -> None:
        fakes = [FakeWorker("red"), Silent()]
        async with workers(*fakes), desk(*fakes, policy="cache_aware") as d:
            for number in range(50):
                assert (await d.post("/v1/completions", {"model": f"made-up-{number}", "prompt": "x"}))[0] == 200
            assert (await d.post("/v1/completions", {"model": "red", "prompt": "x"}))[0] == 200
            assert set(d.gateway.policies._policies) == {"red", None}
            labels = (await d.get("/metrics"))[1].decode()
            assert "made-up" not in labels and 'model="red"' in labels
            red = next(worker for worker in d.gateway.registry if worker.capabilities.models)
            d.gateway.registry.remove(red)
            assert set(d.gateway.policies._policies) == {None}
        async with workers(FakeWorker("red"), FakeWorker("blue")) as fakes, desk(*fakes, policy="cache_aware") as d:
            for number in range(5):
                assert (await d.post("/v1/completions", {"model": f"made-up-{number}", "prompt": "x"}))[0] == 404
            assert set(d.gateway.policies._policies) == {"red", "blue"}

    asyncio.run(main())


def test_an_idle_gateway_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    look, tick = Gateway._look_at_times, HttpServer.on_tick

    def looked(self: Gateway, now_s: float) -> None:
        looks.append("times")
        look(self, now_s)

    async def ticked(self: HttpServer, counter: int) -> bool:
        looks.append("http")
        return await tick(self, counter)

    monkeypatch.setattr(Gateway, "_look_at_times", looked)
    monkeypatch.setattr(HttpServer, "on_tick", ticked)

    async def main() -> None:
        worker = FakeWorker(pause_s=0.01)
        async with workers(worker), desk(worker) as d:
            assert await d.stream({"prompt": "x", "max_tokens": 50})
            assert "times" in looks
            await until(lambda: not d.gateway._called.is_set())  # after the last round of looks
            looks.clear()
            await asyncio.sleep(0.5)
            assert looks in ([], ["http"])
            assert await d.stream({"prompt": "x", "max_tokens": 50}) and "times" in looks

    asyncio.run(main())
