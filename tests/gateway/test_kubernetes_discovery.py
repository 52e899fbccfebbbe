"""Finding workers in Kubernetes, against an API server that speaks as much of the real one's HTTP as is used."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bough.core.errors import SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway import kubernetes as discovery
from bough.gateway.kubernetes import KubernetesPods
from bough.gateway.registry import Registry, RegistryListener
from bough.gateway.worker import Worker

pytest.importorskip("kubernetes.aio")
PATIENCE_S = 60.0


def pod(name: str, ip: str | None = "10.0.0.1", phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "5", **metadata},
        "status": {"phase": phase, **({"podIP": ip} if ip else {})},
    }


class FakeApiServer:
    """Lists `pods`, and sends whatever is put into `events` to the watch that is open."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None ends the watch
        self.asked: list[dict[str, str]] = []
        self.refusals = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append({"path": request.path, **request.query})
        if self.refusals:
            self.refusals -= 1
            return web.json_response({"kind": "Status", "code": 503, "message": "not now"}, status=503)
        if request.query.get("watch"):
            return await self._watch(request)
        content = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": self.pods}
        return web.json_response(content)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
            if event["type"] == "ERROR":
                break
        return response

    def tell(self, kind: str, changed: dict[str, Any]) -> None:
        self.events.put_nowait({"type": kind, "object": changed})


@contextlib.asynccontextmanager
async def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    """A fake API server, and a kubeconfig that leads to it."""
    server = FakeApiServer()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "test", "user": {}}],
    }
    (folder / "config").write_text(json.dumps(config))
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(folder / "config"))
    try:
        yield server
    finally:
        await runner.cleanup()


class Source(RegistryListener):
    """Reads the changes of a registry with patience."""

    def __init__(self, **options: Any) -> None:
        self.registry = Registry(GatewaySettings())
        self.registry.listen(self)
        self._changes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        pods = KubernetesPods(self.registry, ["app=bough", "tier=gpu"], 30000, **options)
        self._following = asyncio.create_task(pods.follow())

    def added(self, worker: Worker) -> None:
        self._changes.put_nowait(("add", worker.url))

    def removed(self, worker: Worker) -> None:
        self._changes.put_nowait(("remove", worker.url))

    async def next(self) -> tuple[str, str]:
        async with asyncio.timeout(PATIENCE_S):
            return await self._changes.get()

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)


def test_pods_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with cluster(tmp_path, monkeypatch) as server:
            server.pods = [pod("a"), pod("pending", None, "Pending")]
            source = Source(namespace="serving")
            assert await source.next() == ("add", "http://10.0.0.1:30000")
            server.tell("ADDED", pod("b", "10.0.0.2"))
            assert await source.next() == ("add", "http://10.0.0.2:30000")
            server.tell("MODIFIED", pod("b", "10.0.0.2"))  # nothing that matters has changed
            server.tell("MODIFIED", pod("pending", "fd00::3"))
            assert await source.next() == ("add", "http://[fd00::3]:30000")
            server.tell("MODIFIED", pod("a", deletionTimestamp="2026-01-01T00:00:00Z"))
            assert await source.next() == ("remove", "http://10.0.0.1:30000")
            server.tell("DELETED", pod("a"))
            server.tell("DELETED", pod("b", "10.0.0.2"))
            assert await source.next() == ("remove", "http://10.0.0.2:30000")
            await source.close()
            listing, watching = server.asked[:2]
            assert listing["path"] == "/api/v1/namespaces/serving/pods"
            assert listing["labelSelector"] == watching["labelSelector"] == "app=bough,tier=gpu"
            assert watching["resourceVersion"] == "7"

    asyncio.run(play())


def test_a_worker_of_another_source_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with cluster(tmp_path, monkeypatch) as server:
            source = Source()
            source.registry.add("http://10.0.0.1:30000", source="flag")
            assert await source.next() == ("add", "http://10.0.0.1:30000")
            for kind, change in (("ADDED", "add"), ("DELETED", "remove")):
                server.tell(kind, pod("a"))
                server.tell(kind, pod("b", "10.0.0.2"))
                assert await source.next() == (change, "http://10.0.0.2:30000")
            assert [(worker.url, worker.source) for worker in source.registry] == [("http://10.0.0.1:30000", "flag")]
            await source.close()

    asyncio.run(play())


def test_what_happened_while_nobody_watched_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with cluster(tmp_path, monkeypatch) as server:
            server.pods = [pod("a"), pod("b", "10.0.0.2")]
            source = Source()
            assert {await source.next(), await source.next()} == {
                ("add", "http://10.0.0.1:30000"),
                ("add", "http://10.0.0.2:30000"),
            }
            server.pods = [pod("b", "10.0.0.2"), pod("c", "10.0.0.3")]
            expired = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            server.events.put_nowait({"type": "ERROR", "object": expired})
            assert await source.next() == ("remove", "http://10.0.0.1:30000")
            assert await source.next() == ("add", "http://10.0.0.3:30000")
            server.pods = [pod("c", "10.0.0.4")]  # a new address: the pod was started again
            server.events.put_nowait(None)
            assert await source.next() == ("remove", "http://10.0.0.2:30000")
            assert await source.next() == ("remove", "http://10.0.0.3:30000")
            assert await source.next() == ("add", "http://10.0.0.4:30000")
            assert server.asked[0]["path"] == "/api/v1/pods"
            await source.close()

    asyncio.run(play())


def test_an_api_server_that_is_away_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LONGEST_PAUSE_S", 0.01)

    async def play() -> None:
        async with cluster(tmp_path, monkeypatch) as server:
            server.pods = [pod("a")]
            source = Source()
            assert await source.next() == ("add", "http://10.0.0.1:30000")
            server.refusals = 3
            server.events.put_nowait(None)
            server.pods = [pod("a"), pod("b", "10.0.0.2")]
            assert await source.next() == ("add", "http://10.0.0.2:30000")
            await source.close()

    asyncio.run(play())


@pytest.mark.parametrize("selector", [[], ["bough"]])
def test_a_selector_must_say_something(selector: list[str]) -> None:
    with pytest.raises(SettingsError, match="app=bough"):
        KubernetesPods(Registry(GatewaySettings()), selector, 30000)


def test_without_a_cluster_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "none")
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", missing)

    pods = KubernetesPods(Registry(GatewaySettings()), ["app=bough"], 30000)
    with pytest.raises(SettingsError, match="no Kubernetes cluster"):
        asyncio.run(pods.follow())


def test_a_watch_that_ends_at_once_is_not_begun_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with cluster(tmp_path, monkeypatch) as server:
            server.pods = [pod("a")]
            for _ in range(1000):
                server.events.put_nowait(None)
            source = Source()
            await source.next()
            waiting = asyncio.create_task(source.next())
            await asyncio.sleep(0.7)
            assert len(server.asked) <= 6  # a listing and a watch at a time
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await source.close()

    asyncio.run(play())
