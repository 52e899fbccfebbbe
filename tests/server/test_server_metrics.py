"""`/metrics` over a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bough.core.finish import FinishAbort
from bough.messages.requests import Generate
from bough.server import context
from tests.server.native_engine import NativeEngine, Play, open_server

REFUSED = FinishAbort("full", 429, "QueueFullError")


def values_on(page: str) -> dict[str, float]:
    """Samples without their labels; buckets left out."""
    samples = (s for family in text_string_to_metric_families(page) for s in family.samples)
    return {s.name.removeprefix("bough:"): s.value for s in samples if "le" not in s.labels}


def serve(
    script: Callable[[Generate], Play], scenario: Callable[[httpx.AsyncClient, NativeEngine], Awaitable[None]]
) -> None:
    async def go() -> None:
        engine = NativeEngine(script)
        async with open_server(engine, api_key="secret") as http:
            await scenario(http, engine)

    asyncio.run(go())


KEY = {"x-api-key": "secret"}


def test_the_counters_say_what_was_done() -> None:
    def script(message: Generate) -> Play:
        return REFUSED if message.rid == "no" else [97, 98, 99]

    async def scenario(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        empty = values_on((await http.get("/metrics")).text)
        assert empty["num_requests_total"] == 0 and empty["num_running_reqs"] == 2
        await http.post("/generate", json={"text": "four"}, headers=KEY)
        await http.post("/generate", json={"text": ["a", "bc"], "stream": True}, headers=KEY)
        assert (await http.post("/generate", json={"text": "a", "rid": "no"}, headers=KEY)).status_code == 429
        assert (await http.get("/health_generate", headers=KEY)).status_code == 200
        reply = await http.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=")
        found = values_on(reply.text)
        expected = {
            "num_requests_total": 4,
            "num_aborted_requests_total": 1,
            "prompt_tokens_total": 7,
            "cached_tokens_total": 3,
            "generation_tokens_total": 9,
            "time_to_first_token_seconds_count": 3,
            "inter_token_latency_seconds_count": 6,
            "e2e_request_latency_seconds_count": 4,
            "queue_time_seconds_count": 3,
            "num_queue_reqs": 1,
            "num_retracted_reqs": 1,
            "token_usage": 0.5,
            "cache_hit_rate": 0.25,
            "gen_throughput": 9.5,
            "num_retracted_requests_total": 3,
            "evicted_tokens_total": 7,
            "disaggregation_transferred_bytes_total": 640,
        }
        assert expected.items() <= found.items()
        assert "device_busy_share" not in found
        assert 'model_name="tiny"' in reply.text

    serve(script, scenario)


def test_who_leaves_is_counted() -> None:
    async def scenario(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        inputs = engine.reader.read(prompt="wait")
        task = asyncio.create_task(engine.client.answers(inputs))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        found = values_on((await http.get("/metrics")).text)
        assert found["num_requests_total"] == found["num_aborted_requests_total"] == 1

    serve(lambda message: None, scenario)


def test_a_stuck_scheduler_does_not_hide_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "STATE_TIMEOUT_S", 0.01)

    async def scenario(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        engine.silent = True
        found = values_on((await http.get("/metrics")).text)
        assert "num_running_reqs" not in found and found["num_requests_total"] == 0
        for path in ("/v1/loads", "/get_load"):
            assert (await http.get(path, headers=KEY)).json()["error"]["type"] in ("EngineStuckError", "server_error")
        assert (await http.get("/server_info", headers=KEY)).json()["internal_states"] == []

    serve(lambda message: None, scenario)
