"""What a client with a key of its own cannot do: manage the fleet, or get hold of a key that is not its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from bough.core.errors import BoughError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway.commands import AdminClient, roll
from bough.gateway.config_file import ConfigFile
from bough.gateway.management import Management
from bough.gateway.registry import Registry
from tests.fakes.gateways import Desk, desk, until
from tests.fakes.workers import FakeWorker, workers

WORKER_MANAGEMENT = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
WORKER_MANAGEMENT += [f"/api/{what}" for what in ("blobs", "copy", "create", "delete", "pull", "push")]
# Of Lemonade, LM Studio, llama-swap, KoboldCpp, TabbyAPI and text-generation-webui.
WORKER_MANAGEMENT += [f"/api/v1/{what}" for what in ("load", "unload", "pull", "delete", "models/load")]
WORKER_MANAGEMENT += ["/api/v1/models/download", "/api/models/unload", "/api/admin/reload_config", "/v1/model/load"]
WORKER_MANAGEMENT += ["/v1/download", "/v1/lora/unload", "/v1/template/switch", "/v1/internal/model/load"]
CLIENT, ADMIN = {"x-api-key": "tenant"}, {"Authorization": "Bearer root"}


def management_calls(d: Desk) -> list[tuple[str, str]]:
    """Every management route of the table, by method and path, and what is management on a worker."""
    worker = next(iter(d.gateway.registry)).id
    own = [
        (method, pattern.pattern.replace("([^/]+)", worker))
        for pattern, methods in Management(d.gateway)._routes
        for method, (_, access) in methods.items()
        if access == "admin"
    ]
    return own + [("POST", path) for path in WORKER_MANAGEMENT]


def test_clients_keys_do_not_open_management() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, api_keys=("tenant",)) as d:
            calls = management_calls(d)
            assert ("POST", "/workers") in calls and ("PUT", "/policies") in calls and ("GET", "/flush_cache") in calls
            for method, path in calls:
                for headers in (CLIENT, {}, {"x-api-key": "wrong"}):
                    body = {"url": "http://127.0.0.1:9", "policy": "random"}
                    status, answer = await d.call(method, path, headers=headers, json=body)
                    assert status == 403 and "start the gateway with --admin-api-key" in str(answer), (method, path)
            assert [(w.url, w.draining) for w in d.gateway.registry] == [(fake.url, False)]
            assert d.gateway.policies.shown() == {"default": "round_robin", "models": {}} and not fake.requests
            assert (await d.post("/v1/completions", {"prompt": "x"}, headers=CLIENT))[0] == 200

    asyncio.run(main())


def test_only_the_admin_key_opens_management() -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"api_keys": ("tenant",), "admin_api_key": "root"}
        async with workers(FakeWorker()) as (fake,), desk(fake, **settings) as d:
            for method, path in management_calls(d):
                assert (await d.call(method, path, headers=CLIENT))[0] == 401, (method, path)
            assert not fake.requests
            assert (await d.get("/workers", headers=ADMIN))[0] == 200
            assert (await d.post("/v1/load_lora_adapter", {"lora_path": "x"}, headers=ADMIN))[0] == 200
            assert [path for path, _, _ in fake.requests] == ["/v1/load_lora_adapter"]

    asyncio.run(main())


SPELLINGS = ("{}", "{}/", "{}/below", "{}%2F", "{}?x=1", "{}//", "{};x", "{};x/y", "{}/;x", "{}%3Bx")


@pytest.mark.parametrize("path", [*WORKER_MANAGEMENT, "/api/blobs/sha256:0"])
def test_no_spelling_of_a_workers_management_is_a_clients(path: str) -> None:
    """Whatever a worker takes for the same route."""
    root, _, rest = path[1:].partition("/")
    spellings = [f"/{root}/{rest.upper()}", f"/{root}//{rest}", f"/{root}/;x/{rest}", f"/{root}/%3B/{rest}"]
    spellings += [spelling.format(path) for spelling in SPELLINGS]

    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, api_keys=("tenant",)) as d:
            for spelling in spellings:
                url = URL(d.url + spelling, encoded=True)
                async with d.client.post(url, headers=CLIENT, data=b"{}") as response:
                    odd = {"//", ";", "%3B"} & {spelling[at : at + n] for at in range(len(spelling)) for n in (1, 2, 3)}
                    assert response.status == (404 if odd else 403), spelling
            assert not fake.requests
            assert (await d.post("/v1/models/load_lora_adapter", {}, headers=CLIENT))[0] != 403

    asyncio.run(main())


def test_a_gateway_without_any_key_is_open() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            assert (await d.get("/workers"))[0] == 200
            assert (await d.post("/flush_cache"))[0] == 200

    asyncio.run(main())


def test_keys_from_the_file_close_management_too(tmp_path: Any) -> None:
    async def main() -> None:
        async with desk() as d:
            file = tmp_path / "gateway.yaml"
            file.write_text("api_keys: [tenant]\n")
            ConfigFile(str(file), d.gateway).apply()
            assert (await d.get("/workers", headers=CLIENT))[0] == 403

    asyncio.run(main())


def test_the_key_of_the_fleet_goes_to_no_worker_that_came_over_http() -> None:
    async def main() -> None:
        seen: dict[str, set[str]] = {}

        class Noting(FakeWorker):
            async def _answer(self, request: web.Request) -> web.StreamResponse:
                seen.setdefault(self.url, set()).add(request.headers.get("Authorization", ""))
                return await super()._answer(request)

        own, stranger, friend = Noting(), Noting(), Noting()
        async with workers(own, stranger, friend), desk(own, worker_api_key="fleet-secret") as d:
            assert (await d.post("/workers", {"url": stranger.url}))[0] == 202
            assert (await d.post("/workers", {"url": friend.url, "api_key": "friend-secret"}))[0] == 202
            await until(lambda: sum(worker.available for worker in d.gateway.registry) == 3)
            for _ in range(6):
                assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 200
            assert (await d.post("/flush_cache"))[0] == 200
            assert all(fake.requests for fake in (own, stranger, friend))
        assert seen == {own.url: {"Bearer fleet-secret"}, stranger.url: {""}, friend.url: {"Bearer friend-secret"}}

    asyncio.run(main())


def test_what_the_configuration_names_gets_the_key_of_the_fleet() -> None:
    registry = Registry(GatewaySettings(worker_api_key="fleet-secret"))
    for source in ("kubernetes", "flag", "file", "launch"):
        registry.add(f"http://{source}:1", source=source)
    assert {worker.api_key for worker in registry} == {"fleet-secret"}
    known = registry.add("http://late:1")
    assert known.api_key is None and known.source == "api"
    assert registry.add("http://late:1", source="file") is known
    assert known.api_key == "fleet-secret" and known.source == "file"
    registry.add("http://own:1", "own-secret")
    assert registry.add("http://own:1", source="file").api_key == "own-secret"


INFO = {
    "model_path": "/srv/models/secret-place/llama.gguf",
    "tokenizer_path": "/srv/tokenizers/secret-place",
    "served_model_name": "llama",
    "context_length": 8192,
    "chat_template": "/srv/secret-place/template.jinja",
    "crash_dump_folder": "/var/secret-place",
    "lora_paths": ["a=/srv/secret-place/a"],
    "kv_events_config": "{}",
    "host": "10.0.0.7",
    "max_total_num_tokens": 100,
    "version": "1.2",
    "internal_states": [{"last_gen_throughput": 5.0, "model_path": "/srv/secret-place", "live_settings": {"a": 1}}],
}
SEEN = {
    "model_path": "llama",
    "tokenizer_path": "llama",
    "served_model_name": "llama",
    "context_length": 8192,
    "max_total_num_tokens": 100,
    "version": "1.2",
    "internal_states": [{"last_gen_throughput": 5.0}],
}


class Telling(FakeWorker):
    answer: Any = INFO

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("_info"):
            return web.Response(text=self.answer) if isinstance(self.answer, str) else web.json_response(self.answer)
        return await super()._answer(request)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info", "/model_info", "/get_model_info"])
def test_settings_of_workers_are_the_operators(path: str) -> None:
    async def main() -> None:
        async with workers(Telling()) as (fake,):
            async with desk(fake, api_keys=("tenant",), admin_api_key="root") as d:
                assert await d.get(path, headers=CLIENT) == (200, SEEN)
                assert await d.get(path, headers=ADMIN) == (200, INFO)
                assert (await d.get(path, headers={"x-api-key": "wrong"}))[0] == 401
                assert (await d.get(path))[0] == 401
            async with desk(fake, api_keys=("tenant",)) as d:
                assert await d.get(path, headers=CLIENT) == (200, SEEN)
            for settings in ({}, {"admin_api_key": "root"}):
                async with desk(fake, **settings) as d:
                    assert await d.get(path) == (200, INFO)

    asyncio.run(main())


def test_a_name_of_the_hub_is_no_path_and_what_cannot_be_read_is_not_shown() -> None:
    async def main() -> None:
        async with workers(Telling()) as (fake,), desk(fake, api_keys=("tenant",)) as d:
            for given, seen in (
                ({"model_path": "Org/Model-1.5"}, {"model_path": "Org/Model-1.5"}),
                ({"model_path": "/srv/models/Model-1.5/"}, {"model_path": "Model-1.5"}),
                ({"model_path": "../models/a", "internal_states": {"a": 1}}, {"model_path": "a"}),
                ({"model_path": None, "chat_template": {"sources": {}}}, {"chat_template": {"sources": {}}}),
            ):
                fake.answer = given
                assert await d.get("/server_info", headers=CLIENT) == (200, seen)
            fake.answer = "/srv/secret-place: no JSON"
            status, answer = await d.get("/server_info", headers=CLIENT)
            assert status == 502 and "secret-place" not in str(answer)

    asyncio.run(main())


def test_a_redirect_takes_no_key_anywhere() -> None:
    async def main() -> None:
        class Redirecting(FakeWorker):
            async def _answer(self, request: web.Request) -> web.StreamResponse:
                if request.path in ("/health", "/v1/models"):
                    return await super()._answer(request)
                return web.Response(status=307, headers={"Location": elsewhere.url + request.path})

        elsewhere, sly = FakeWorker(), Redirecting()
        async with workers(elsewhere, sly), desk(sly, worker_api_key="fleet-secret") as d:
            for path in ("/v1/completions", "/generate"):
                async with d.client.post(d.url + path, json={"prompt": "x"}, allow_redirects=False) as answer:
                    assert answer.status == 307 and "fleet-secret" not in str(answer.headers)
            with pytest.raises(BoughError, match="307"):
                await asyncio.to_thread(AdminClient(sly.url, "admin-secret").workers)
            assert not elsewhere.requests

    asyncio.run(main())


@pytest.mark.parametrize(
    "path", ["/v1/../flush_cache", "/v1/%2e%2e/flush_cache", "/api/./../flush_cache", "/v1/..", "/v1/..;x/a"]
)
def test_a_path_with_dot_segments_is_nobodys(path: str) -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, api_keys=("tenant",)) as d:
            reader, writer = await asyncio.open_connection(*d.url.removeprefix("http://").split(":"))
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: tenant\r\ncontent-length: 0\r\n\r\n".encode()
            )
            assert b" 404 " in await reader.readline()
            writer.close()
            assert not fake.requests

    asyncio.run(main())


def test_roll_brings_the_key_of_the_workers_that_come() -> None:
    async def main() -> None:
        old, new = FakeWorker(), FakeWorker(api_key="new-secret")
        async with workers(old, new), desk(old) as d:
            pair = [(old.url, new.url)]
            client = AdminClient(d.url)
            await asyncio.to_thread(roll, client, pair, 30.0, lambda line: None, worker_api_key="new-secret")
            assert [(w.url, w.api_key) for w in d.gateway.registry] == [(new.url, "new-secret")]

    asyncio.run(main())


def test_head_of_what_a_worker_says_of_itself_blames_no_worker() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, api_keys=("tenant",), admin_api_key="root") as d:
            for _ in range(20):
                assert await d.call("HEAD", "/server_info", headers=CLIENT) == (200, b"")
            (worker,) = d.gateway.registry
            assert worker.breaker.closed and not d.gateway.metrics.failures

    asyncio.run(main())
