"""The gateway lets in the same web pages as a server does, and its workers need not know of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from bough.cli.gateway import _parser, settings_from
from bough.core.gateway_settings import GatewaySettings
from bough.gateway import service
from bough.server.http import open_listener
from tests.fakes.gateways import desk
from tests.fakes.workers import FakeWorker, workers

PAGE = "https://page.example"
FOREIGN = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
IMAGE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
OWN = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
TEXT = {"Content-Type": "text/plain"}
JSON = {"Content-Type": "application/json"}


PROXIED = {"Origin": "https://app.example", "X-Forwarded-Host": "app.example", "X-Forwarded-Proto": "https"}
COMPLETE, MODELS = ("POST", "/v1/completions"), ("GET", "/v1/models")
Row = tuple[tuple[str, str], dict[str, str], int]
TABLES: dict[str, tuple[dict[str, Any], list[Row]]] = {
    "without flags": (
        {},
        [
            (COMPLETE, {"Content-Type": "application/x-www-form-urlencoded"}, 200),  # curl -d
            (COMPLETE, OWN | JSON, 200),
            (COMPLETE, OWN | TEXT, 415),
            (COMPLETE, PROXIED | JSON, 200),
            (COMPLETE, FOREIGN | JSON, 403),
            (COMPLETE, FOREIGN | TEXT, 403),
            (COMPLETE, {"Host": "evil.example"} | JSON, 403),
            (MODELS, OWN, 200),
            (MODELS, {"Sec-Fetch-Site": "none"}, 200),
            (MODELS, IMAGE, 403),
            (("GET", "/liveness"), {}, 200),
            (("GET", "/workers"), IMAGE, 403),
            (("GET", "/metrics"), {"Host": "evil.example"}, 403),
            (("GET", "/no/such/path"), IMAGE, 403),
            (("POST", "/flush_cache"), FOREIGN | TEXT, 403),
            (("POST", "/workers"), FOREIGN | TEXT, 403),
            (("OPTIONS", "/v1/completions"), FOREIGN, 403),
        ],
    ),
    "an allowed origin": (
        {"allowed_origins": PAGE},
        [
            (COMPLETE, FOREIGN | JSON, 200),
            (COMPLETE, FOREIGN | TEXT, 415),
            (COMPLETE, {"Origin": "https://other.example"} | JSON, 403),
            (MODELS, IMAGE, 403),
        ],
    ),
    "any origin": ({"allowed_origins": "*"}, [(COMPLETE, FOREIGN | JSON, 200), (MODELS, IMAGE, 200)]),
    "an allowed host": (
        {"allowed_hosts": "app.example"},
        [(MODELS, {"Host": "app.example:30000"}, 200), (MODELS, {"Host": "evil.example"}, 403)],
    ),
    "another proxy": ({"forwarded_allow_ips": "10.0.0.1"}, [(COMPLETE, PROXIED | JSON, 403)]),
}


@pytest.mark.parametrize("name", TABLES)
def test_which_pages_are_let_in(name: str) -> None:
    settings, rows = TABLES[name]

    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, **settings) as d:
            for (method, path), headers, status in rows:
                before = len(_asked(fake))
                body = b'{"prompt": "x"}' if method == "POST" else None
                told, content = await d.call(method, path, headers=headers, data=body)
                assert told == status, (method, path, headers)
                if status in (403, 415):
                    assert len(_asked(fake)) == before and content["error"]["message"]

    asyncio.run(main())


def _asked(fake: FakeWorker) -> list[Any]:
    return [request for request in fake.requests if request[0] in ("/v1/completions", "/flush_cache")]


def test_a_preflight_is_answered_by_the_gateway_and_a_worker_hears_of_no_page() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, allowed_origins=PAGE) as d:
            asked = FOREIGN | {"Access-Control-Request-Method": "POST"}
            async with d.client.options(d.url + "/v1/completions", headers=asked) as reply:
                assert reply.status == 200 and reply.headers["Access-Control-Allow-Origin"] == PAGE
            headers = FOREIGN | JSON | {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty", "X-Own": "kept"}
            async with d.client.post(d.url + "/v1/completions", data=b'{"prompt": "x"}', headers=headers) as reply:
                assert reply.status == 200 and reply.headers.getall("Access-Control-Allow-Origin") == [PAGE]
            (_, seen, _) = _asked(fake)[-1]
            assert seen["x-own"] == "kept"
            assert not {"origin", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"} & seen.keys()

    asyncio.run(main())


def test_bough_gateway_keeps_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GatewaySettings(port=0, allowed_origins=PAGE, allowed_hosts="app.example")

    async def main() -> None:
        endings: list[asyncio.Event] = []
        monkeypatch.setattr(service, "end_on_signals", endings.append)
        asking: list[asyncio.Task[None]] = []

        async def ask(url: str) -> None:
            try:
                assert await _statuses(url) == [200, 200, 200, 403, 403]
            finally:
                endings[0].set()

        with open_listener(settings) as listener:
            await service.serve(settings, listener, lambda url: asking.append(asyncio.create_task(ask(url))))
        await asking[0]

    asyncio.run(main())


async def _statuses(url: str) -> list[int]:
    tried: tuple[Mapping[str, str], ...] = ({}, FOREIGN, {"Host": "app.example"}, {"Host": "evil.example"}, IMAGE)
    async with aiohttp.ClientSession() as client:
        found = []
        for headers in tried:
            async with client.get(url + "/liveness", headers=headers) as reply:
                found.append(reply.status)
                assert (headers is FOREIGN) == ("Access-Control-Allow-Origin" in reply.headers)
        return found


def test_the_flags_are_those_of_a_server() -> None:
    flags = ["--allowed-origins", PAGE, "--allowed-hosts", "a.example,b.example", "--forwarded-allow-ips", "10.0.0.0/8"]
    edge = settings_from(_parser().parse(flags), environ={})
    assert (edge.allowed_origins, edge.allowed_hosts) == (PAGE, "a.example,b.example")
    assert edge.forwarded_allow_ips == "10.0.0.0/8"
    edge = settings_from(_parser().parse([]), environ={"BOUGH_GATEWAY_ALLOWED_HOSTS": "c.example"})
    assert (edge.allowed_hosts, edge.forwarded_allow_ips) == ("c.example", "127.0.0.1")
