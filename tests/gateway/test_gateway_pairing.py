"""The gateway names a prefill engine to the decode engine, and another one when that is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from bough.cli.gateway import _parser, settings_from
from bough.core.errors import SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway.pairing import UNAVAILABLE, Pairing
from bough.gateway.registry import Registry
from bough.server.errors import Failure, shape_of
from tests.fakes.gateways import desk, until
from tests.fakes.workers import FakeWorker, text_of, tokens_of, workers


class DecodeEngine(FakeWorker):
    """Remembers where prompts were to be computed; engines in `lost` (by bootstrap port) cannot be reached."""

    def __init__(self, lost: tuple[int, ...] = (), slow: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.lost, self.slow = lost, slow
        self.places: list[tuple[Any, Any]] = []

    async def _work(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        place = body.get("bootstrap_host"), body.get("bootstrap_port")
        self.places.append(place)
        if place[1] in self.slow:
            await asyncio.sleep(60)
        if place[1] in self.lost:
            failure = Failure(503, "The prefill engine is gone.", UNAVAILABLE)
            return web.json_response(shape_of(path)(failure), status=503)
        return await super()._work(request, path, body)


def answer_of(prompt: str) -> str:
    return text_of(tokens_of(prompt, 6))


def run(decode: DecodeEngine, prompts: int, ports: tuple[int, ...] = (8001, 8002), **settings: Any) -> None:
    async def main() -> None:
        prefills = [FakeWorker() for _ in ports]
        async with workers(decode, *prefills) as fakes:
            pairs = tuple((fake.url, port) for fake, port in zip(fakes[1:], ports, strict=True))
            chosen = {"pd_disaggregation": True, "prefill": pairs, "prefill_policy": "round_robin", **settings}
            async with desk(decode, healthy=1 + len(ports), **chosen) as d:
                for number in range(prompts):
                    body = {"prompt": f"p{number}", "max_tokens": 6, "bootstrap_host": "elsewhere"}
                    status, answer = await d.post("/v1/completions", body)
                    assert status == 200 and answer["choices"][0]["text"] == answer_of(f"p{number}")
                assert all(worker.load == 0 for worker in d.gateway.registry)
                assert sum(worker.breaker.state(0.0).name == "OPEN" for worker in d.gateway.registry) == 0

    asyncio.run(main())


def test_prefill_engines_take_turns_and_clients_cannot_choose_them() -> None:
    decode = DecodeEngine()
    run(decode, 4)
    assert sorted(decode.places) == [("127.0.0.1", 8001)] * 2 + [("127.0.0.1", 8002)] * 2


def test_prefill_engines_have_the_common_policy_where_they_have_none_of_their_own() -> None:
    for given, chosen in (
        ({}, "cost"),
        ({"policy": "random"}, "random"),
        ({"prefill_policy": "prefix_hash"}, "prefix_hash"),
    ):
        settings = GatewaySettings(decode_policy="round_robin", **given)
        assert Pairing(Registry(settings), settings).policies.default.name == chosen


def test_a_lost_prefill_engine_is_the_fault_of_no_decode_engine() -> None:
    decode = DecodeEngine(lost=(8001,))
    run(decode, 3, retry_max_retries=0)
    assert ("127.0.0.1", 8001) in decode.places and decode.places.count(("127.0.0.1", 8002)) == 3


def test_without_a_prefill_engine_the_decode_engine_gets_the_request_alone() -> None:
    decode = DecodeEngine(lost=(8001, 8002))
    run(decode, 2)
    assert decode.places.count((None, None)) == 2


def test_a_prefill_engine_that_leaves_the_rotation_frees_its_requests_at_once() -> None:
    async def main() -> None:
        decode, first, second = DecodeEngine(slow=(8001,)), FakeWorker(), FakeWorker()
        async with workers(decode, first, second):
            pairs = ((first.url, 8001),)
            async with desk(decode, healthy=2, pd_disaggregation=True, prefill=pairs) as d:
                asking = asyncio.create_task(d.post("/v1/completions", {"prompt": "p", "max_tokens": 6}))
                await until(lambda: decode.places)
                status, shown = await d.post(
                    "/workers", {"url": second.url, "worker_type": "prefill", "bootstrap_port": 8002}
                )
                assert status == 202 and (shown["worker_type"], shown["bootstrap_port"]) == ("prefill", 8002)
                await until(lambda: len(d.gateway.registry.prefills(None)) == 2)
                await first.stop()
                status, answer = await asking
                assert status == 200 and answer["choices"][0]["text"] == answer_of("p")
                assert decode.places[-1] == ("127.0.0.1", 8002)

    asyncio.run(main())


def test_flags_of_a_pair() -> None:
    words = ["--pd-disaggregation", "--prefill", "http://a:1", "9001", "--prefill", "http://b:1", "--decode", "c", "d"]
    settings = settings_from(_parser().parse(words), (), {})
    assert settings.prefill == (("http://a:1", 9001), ("http://b:1", 8998)) and settings.worker_urls == ("c", "d")
    with pytest.raises(SettingsError, match="are for --pd-disaggregation"):
        settings_from(_parser().parse(words[1:]), (), {})
    with pytest.raises(SettingsError, match="takes a URL and perhaps a port"):
        settings_from(_parser().parse(["--pd-disaggregation", "--prefill", "http://a:1", "x"]), (), {})
