"""The page on a gateway: the server's files, told that a gateway serves them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from bough.gateway.call import KEPT
from tests.fakes.gateways import desk
from tests.fakes.workers import FakeWorker, workers


def test_the_page_is_open_and_knows_that_it_is_a_gateways() -> None:
    async def main() -> None:
        async with desk(api_keys=("k1",), admin_api_key="root") as d:
            async with d.client.get(d.url + "/ui") as response:
                assert response.status == 200 and 'data-of="gateway"' in await response.text()
                assert "default-src 'none'" in response.headers["content-security-policy"]
                assert response.headers["content-type"] == "text/html; charset=utf-8"
            async with d.client.get(d.url + "/ui/app.js") as response:
                assert response.status == 200 and response.headers["content-type"].startswith("text/javascript")
            async with d.client.get(d.url + "/ui/", allow_redirects=False) as response:
                assert response.status == 307 and response.headers["location"] == "../ui"
            assert (await d.get("/ui/nothing.js"))[0] == 404
            assert (await d.get("/workers"))[0] == 401, "what it shows needs the key"

    asyncio.run(main())


def test_files_are_sent_compressed_to_those_who_take_them_so() -> None:
    async def main() -> None:
        async with desk() as d:
            whole = {}
            for path in ("/ui", "/ui/app.js"):
                for accepted in ("gzip, br", "identity"):
                    async with d.client.get(d.url + path, headers={"accept-encoding": accepted}) as response:
                        assert response.headers.get("content-encoding") == ("gzip" if "gzip" in accepted else None)
                        assert response.headers["vary"] == "accept-encoding"
                        whole[accepted] = await response.read(), int(response.headers["content-length"])
                (packed, sent), (plain, size) = whole.values()
                assert packed == plain and sent < size == len(plain)
                assert path != "/ui" or b'data-of="gateway"' in packed
            async with d.client.get(d.url + "/workers", headers={"accept-encoding": "gzip"}) as response:
                assert "content-encoding" not in response.headers

    asyncio.run(main())


def test_disable_ui_takes_it_away() -> None:
    async def main() -> None:
        async with desk(disable_ui=True) as d:
            assert (await d.get("/ui"))[0] == 404 and (await d.get("/ui/app.js"))[0] == 404
            for path in ("/ui/tree/w", "/ui/tree/w/text/1-0", "/ui/timeline/w/0", "/ui/timeline/w/0/r"):
                status, answer = await d.get(path)
                assert status == 404 and "There is no /ui" in str(answer)

    asyncio.run(main())


def test_it_is_told_where_requests_went_and_why() -> None:
    prompt = "A long beginning that many requests share, and then a question: "

    async def main() -> list[dict[str, Any]]:
        async with workers(FakeWorker(), FakeWorker()) as (first, second), desk(first, second, policy="cost") as d:
            url = first.url
            for headers in ({}, {}, {"X-SMG-Target-Worker": url}, {"X-Session-Id": "s"}):
                body = {"model": "tiny", "prompt": prompt * 20}
                assert (await d.post("/v1/completions", body, headers=headers))[0] == 200
            d.gateway.registry.drain(next(each for each in d.gateway.registry if each.url == second.url))
            await d.post("/v1/completions", {"model": "tiny", "prompt": "new"})
            status, answer = await d.get("/routing")
            assert status == 200 and prompt not in str(answer)
            assert answer["requests"][2]["worker"] == answer["requests"][4]["worker"] == url
            assert all(each["status"] == 200 for each in answer["requests"])
            return list(answer["requests"])

    new, again, named, session, only = asyncio.run(main())
    assert new["reason"] == "CostPolicy" and new["expected_cached"] == 0
    assert (again["reason"], again["expected_cached"], again["worker"]) == ("CostPolicy", 1, new["worker"])
    assert named["reason"] == "the request names it" and session["reason"] == "its session stays there"
    assert only["reason"] == "no other could take it"


def test_where_requests_went_needs_the_management_key_and_is_bounded() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, api_keys=("k1",), admin_api_key="root") as d:
            for _ in range(KEPT + 5):
                await d.post("/v1/completions", {"prompt": "a"}, headers={"Authorization": "Bearer k1"})
            assert (await d.get("/routing", headers={"Authorization": "Bearer k1"}))[0] == 401
            status, answer = await d.get("/routing", headers={"Authorization": "Bearer root"})
            assert status == 200 and len(answer["requests"]) == KEPT

    asyncio.run(main())


TREE = b'data: {"replicas": []}\n\n'


@dataclass
class WatchedWorker(FakeWorker):
    """Streams its tree in pieces, without an end."""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ui/tree" and request.headers.get("Authorization") == "Bearer w":
            answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
            await answer.prepare(request)
            for piece in (TREE[:9], TREE[9:-1], TREE[-1:]):
                await answer.write(piece)
                await asyncio.sleep(0.02)
            await asyncio.sleep(60)
        if request.path == "/ui/tree/text" and self.mode == "secretive":
            return web.Response(status=403)
        if request.path in ("/ui/timeline", "/ui/tree/text"):
            return web.json_response(dict(request.query))
        return await super()._answer(request)


def test_a_workers_tree_and_timeline_are_shown_to_the_operator_and_are_no_requests() -> None:
    root = {"Authorization": "Bearer root"}

    async def main() -> None:
        fake = WatchedWorker(api_key="w")
        keys = {"api_keys": ("k1",), "admin_api_key": "root", "worker_api_key": "w"}
        async with workers(fake), desk(fake, **keys) as d:
            (worker,) = d.gateway.registry
            ways = ("tree/{}", "tree/{}/text/1-0", "timeline/{}/0.5", "timeline/{}/0.5/chatcmpl-1")
            for path in ("/ui/" + way.format(worker.id) for way in ways):
                assert (await d.get(path))[0] == 401
                assert (await d.get(path, headers={"Authorization": "Bearer k1"}))[0] == 401, "other clients' requests"
            d.gateway.registry.drain(worker)
            async with d.client.get(f"{d.url}/ui/tree/{worker.id}", headers=root) as response:
                assert response.status == 200 and response.content_type == "text/event-stream"
                assert await response.read() == TREE, "one snapshot, though the worker's stream goes on"
            timeline, text = f"/ui/timeline/{worker.id}", f"/ui/tree/{worker.id}/text"
            assert await d.get(f"{timeline}/1.5", headers=root) == (200, {"since": "1.5"})
            asked = await d.get(f"{timeline}/0/a&since=9 b", headers=root)
            assert asked == (200, {"since": "0", "rid": "a&since=9 b"}), "what a client named a request is no query"
            assert await d.get(f"{text}/7-3", headers=root) == (200, {"node": "7-3"})
            fake.mode = "secretive"
            status, answer = await d.get(f"{text}/7-3", headers=root)
            assert status == 502 and "must be the worker's --admin-api-key as well" in str(answer)
            fake.mode = "ok"
            assert (await d.get("/ui/tree/nobody", headers=root))[0] == 404
            assert (await d.get("/routing", headers=root))[1]["requests"] == [], "a look is none"
            worker.api_key = "wrong"
            status, answer = await d.get(f"/ui/tree/{worker.id}", headers=root)
            assert status == 502 and "--worker-api-key" in str(answer), "the page must not ask for its user's key"
            await fake.stop()
            assert (await d.get(f"/ui/tree/{worker.id}", headers=root))[0] == 502

    asyncio.run(main())
