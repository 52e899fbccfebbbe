"""When workers are asked how they are, and what changes with the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

import bough.gateway.health
from bough.gateway.worker import Lease
from tests.fakes.gateways import desk, until
from tests.fakes.workers import FakeWorker, next_token, text_of, tokens_of, workers


class Hanging(FakeWorker):
    """Falls silent after the first event of a stream, and then for everything."""

    async def _work(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("resume"):
            return await super()._work(request, path, body)
        token = next_token("x", [])
        event = json.dumps({"id": "a", "created": 1, "text": text_of([token])})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f": ids {token}\ndata: {event}\n\n".encode())
        self.mode = "black_hole"
        await asyncio.sleep(3600)
        return response


def test_silence_in_a_stream_is_a_reason_to_ask() -> None:
    async def main() -> None:
        fakes = [Hanging(), FakeWorker()]
        async with workers(*fakes), desk(*fakes, health_check_interval_secs=600.0) as d, asyncio.timeout(20):
            for _ in range(2):
                raw = await d.stream({"prompt": "x"})
                texts = [json.loads(line[6:])["text"] for line in raw.splitlines() if line.startswith(b"data: {")]
                assert "".join(texts) == text_of(tokens_of("x", 4))

    asyncio.run(main())


def test_a_worker_that_somebody_else_took_out_is_asked_soon() -> None:
    """As `--launch` does with an engine whose process has ended: it is started again, and ready in seconds."""

    async def main() -> None:
        settings = {"health_check_interval_secs": 600.0}
        async with workers(FakeWorker()) as (fake,), desk(fake, **settings) as d, asyncio.timeout(20):
            worker = next(iter(d.gateway.registry))
            fake.health = 503
            d.gateway.registry.leave_rotation(worker, "its process has ended")
            await until(lambda: "health check failed" in (worker.last_error or ""))
            fake.health = 200
            await until(lambda: worker.in_rotation)

    asyncio.run(main())


class Mute(FakeWorker):
    """Never tells its load."""

    looked = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/loads":
            self.looked += 1
            await asyncio.sleep(3600)
        return await super()._answer(request)


@pytest.mark.parametrize("timeout_s", [0.2, 60.0])
def test_a_load_that_is_not_told_neither_hides_a_dead_worker_nor_holds_up_its_check(
    timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(bough.gateway.health, "LOAD_PAUSE_S", 0.05)
        settings = {"health_check_interval_secs": 600.0, "health_check_timeout_secs": timeout_s}
        async with workers(Mute()) as (mute,), desk(mute, **settings) as d, asyncio.timeout(20):
            worker = next(iter(d.gateway.registry))
            assert isinstance(mute, Mute)
            await until(lambda: mute.looked)
            mute.health = 503
            if timeout_s > 1:  # nobody waits for the time of the look to pass
                worker.suspect()
            await until(lambda: not worker.in_rotation)

    asyncio.run(main())


def test_a_model_whose_worker_is_starting_is_waited_for() -> None:
    async def main() -> None:
        a, b = FakeWorker(model="a"), FakeWorker(model="b", health=503)
        async with workers(a, b) as fakes, desk(*fakes, healthy=1) as d:
            early = asyncio.create_task(d.post("/v1/completions", {"model": "b", "prompt": "x"}))
            wrong = asyncio.create_task(d.post("/v1/completions", {"model": "c", "prompt": "x"}))
            await until(lambda: d.gateway.dispatch.waiting == 2)
            b.health = 200
            assert (await early)[0] == 200
            status, answer = await wrong
            assert status == 404 and "a, b" in answer["error"]["message"]

    asyncio.run(main())


def test_models_are_looked_at_with_every_check() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            fake.model = "other"
            await until(lambda: d.gateway.registry.models() == ["other"])
            assert (await d.post("/v1/completions", {"model": "other", "prompt": "x"}))[0] == 200

    asyncio.run(main())


def test_checks_can_ask_for_another_path() -> None:
    async def main() -> None:
        async with workers(FakeWorker(health=500)) as (fake,), desk(fake, health_check_endpoint="alive") as d:
            assert d.gateway.registry.available(None)
            assert {path for path, _, _ in fake.requests} == {"/alive"}

    asyncio.run(main())


def test_a_check_that_breaks_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        faults = [ZeroDivisionError(), UnicodeError()]
        ask = bough.gateway.health.is_well

        async def is_well(*given: Any) -> None:
            if faults:
                raise faults.pop()
            await ask(*given)

        monkeypatch.setattr(bough.gateway.health, "is_well", is_well)
        async with workers(FakeWorker()) as (fake,), desk(fake, health_failure_threshold=9) as d:
            assert not faults and d.gateway.registry.available(None)

    asyncio.run(main())


def test_what_others_have_sent_is_the_report_without_our_own() -> None:
    async def main() -> None:
        async with workers(FakeWorker(running=7)) as (fake,), desk(fake) as d:
            (worker,) = d.gateway.registry
            worker.note_report(7.0, None, own_before=0)
            leases = [Lease(worker, lambda: None, prefill_tokens=100.0) for _ in range(3)]
            assert (worker.load, worker.prefill_tokens) == (3, 300.0)
            leases[0].prefilled()
            assert worker.prefill_tokens == 200.0
            worker.note_report(7.0, 2000.0, own_before=1)
            assert (worker.reported_load, worker.other_load, worker.speed) == (7.0, 4.0, 2000.0)
            worker.note_report(7.0, None, own_before=5)  # some of which have ended since
            assert worker.other_load == 2.0
            for lease in leases:
                lease.succeed()
            assert (worker.load, worker.prefill_tokens) == (0, 0.0)

    asyncio.run(main())


def test_a_load_is_known_before_the_first_request() -> None:
    async def main() -> None:
        async with workers(FakeWorker(running=7), FakeWorker()) as fakes, desk(*fakes, policy="least_loaded") as d:
            assert [worker.reported_load for worker in d.gateway.registry] == [7.0, 0.0]
            status, answer = await d.post("/v1/completions", {"prompt": "x"})
            assert (status, answer["port"]) == (200, fakes[1].port)

    asyncio.run(main())
