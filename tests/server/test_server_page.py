"""The page at /ui: open files that call no other host, and a live tree that costs nothing while nobody watches it."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bough.messages.requests import GetTree
from bough.server import live_tree
from bough.server.app import App, Front
from bough.server.page import FOLDER, page_files
from bough.server.protocols import all_endpoints
from bough.server.tracing import RecentRequests
from tests.fakes.whole_engine import WholeEngine
from tests.server.native_engine import NativeEngine, open_server
from tools import ten_minutes

LARGEST_GZIPPED = 300_000
TREE = {"clock": 4, "parent": [-1], "tokens": [3], "ids": [*b"hi"]}
API, ADMIN = {"authorization": "Bearer api"}, {"x-api-key": "admin"}


def engine() -> NativeEngine:
    made = NativeEngine(lambda message: [97])
    made.state = TREE
    return made


def test_a_strangers_first_ten_minutes_find_the_models_name() -> None:
    assert f'"{ten_minutes.GREETING}"' in (FOLDER / "app.js").read_text()


def get(path: str, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with open_server(engine(), **settings) as http:
            return await http.get(path, headers=headers)

    return asyncio.run(go())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_tree, "PERIOD_S", 0.01)
    monkeypatch.setattr(live_tree, "SNAPSHOTS", 2)


@pytest.mark.parametrize(
    ("path", "kind"), [("/ui", "text/html"), ("/ui/app.js", "text/javascript"), ("/ui/app.css", "text/css")]
)
def test_files_are_open_and_may_load_nothing_else(path: str, kind: str) -> None:
    response = get(path, api_key="api", admin_api_key="admin")
    assert response.status_code == 200 and response.headers["content-type"] == f"{kind}; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]


def test_files_are_sent_compressed_to_those_who_take_them_so() -> None:
    small, plain = get("/ui/app.js"), get("/ui/app.js", {"accept-encoding": "identity"})
    assert small.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert int(small.headers["content-length"]) < len(plain.content) / 2 and small.content == plain.content
    assert small.headers["vary"] == plain.headers["vary"] == "accept-encoding"


def test_the_page_finds_its_files_below_any_prefix() -> None:
    named = re.findall(r'(?:href|src)="([^"]+)"', get("/ui").text)
    assert sorted(named) == ["data:,", "ui/app.css", "ui/app.js"]
    assert get("/llm/ui/app.js", root_path="/llm").status_code == 200
    moved = get("/ui/")
    assert moved.status_code == 307 and moved.headers["location"] == "../ui"


def test_the_files_name_no_other_host_and_are_small() -> None:
    whole = b"".join(file.body for file in page_files().values())
    hosts = set(re.findall(rb"https?://([\w.-]+)", whole))
    assert hosts <= {b"www.w3.org", b"github.com"}, "names of XML and text of an error, which are not fetched"
    assert len(gzip.compress(whole)) < LARGEST_GZIPPED
    assert {file.name for file in FOLDER.iterdir()} == {"index.html", "app.js", "app.css"}


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/../page.py", "/ui/%2e%2e%2fpage.py", "/ui/sub/app.js"])
def test_there_is_no_other_file(path: str) -> None:
    assert get(path).status_code == 404


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/app.js", "/ui/tree", "/ui/tree/text?node=1-0", "/ui/timeline"])
def test_disable_ui_takes_all_of_it_away(path: str) -> None:
    assert get(path, disable_ui=True).status_code == 404


@pytest.mark.parametrize(
    ("keys", "path", "sent", "status"),
    [
        ({}, "/ui/tree", {}, 200),
        ({}, "/ui/tree/text?node=1-0", {}, 200),
        ({"api_key": "api"}, "/ui/tree", {}, 401),
        ({}, "/ui/timeline?since=1.5", {}, 200),
        ({}, "/ui/timeline?since=x", {}, 400),
        ({"api_key": "api"}, "/ui/timeline", {}, 401),
        ({"api_key": "api"}, "/ui/timeline", API, 200),
        ({"api_key": "api"}, "/ui/tree", API, 200),
        # Prompts of others stand in the tree: a client's key must never open them.
        ({"api_key": "api"}, "/ui/tree/text?node=1-0", API, 403),
        ({"api_key": "api", "admin_api_key": "admin"}, "/ui/tree/text?node=1-0", API, 401),
        ({"api_key": "api", "admin_api_key": "admin"}, "/ui/tree/text?node=1-0", ADMIN, 200),
        ({}, "/ui/tree/text", {}, 400),
        ({}, "/ui/tree/text?node=-1-0", {}, 400),
        ({}, "/ui/tree/text?node=x", {}, 400),
        ({}, f"/ui/tree/text?node={'9' * 5000}-1", {}, 400),
    ],
)
def test_data_needs_a_key(keys: dict[str, str], path: str, sent: dict[str, str], status: int) -> None:
    assert get(path, sent, **keys).status_code == status


def test_text_is_that_of_the_node_and_of_no_other() -> None:
    assert get("/ui/tree/text?node=1-0").json() == {"text": "hi"}

    async def gone() -> httpx.Response:
        missing = engine()
        missing.state = {"ids": None}
        async with open_server(missing) as http:
            return await http.get("/ui/tree/text?node=1-0")

    response = asyncio.run(gone())
    assert response.status_code == 404 and "not in the tree" in response.json()["error"]["message"]


def test_a_snapshot_that_has_not_changed_is_not_sent_again() -> None:
    assert get("/ui/tree").text.count("data: ") == 1 and get("/ui/tree").text.count(": as before") == 1


def test_all_that_watch_share_one_snapshot_and_nobody_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_tree, "PERIOD_S", 0.5)
    monkeypatch.setattr(live_tree, "SNAPSHOTS", 1)

    async def go() -> list[Any]:
        watched = engine()
        async with open_server(watched) as http:
            await http.get("/ui")
            assert not watched.commands
            await asyncio.gather(*(http.get("/ui/tree") for _ in range(5)))
        return watched.commands

    assert [type(command) for command in asyncio.run(go())] == [GetTree]


def snapshots(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))["replicas"][0]


def test_the_stream_shows_what_the_scheduler_has_cached() -> None:
    async def go() -> tuple[list[dict[str, Any]], str]:
        whole = WholeEngine(chunk_tokens=64)
        context = whole.context()
        transport = httpx.ASGITransport(app=App(all_endpoints(context), context.settings.server))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            seen = [*snapshots((await http.get("/ui/tree")).text)]
            for text in ("common beginning, one", "common beginning, two"):
                body = {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
                assert (await http.post("/generate", json=body)).status_code == 200
            seen += snapshots((await http.get("/ui/tree")).text)
            root = seen[-1]["parent"].index(-1)
            name = f"{seen[-1]['created'][root]}-0"
            return seen, (await http.get(f"/ui/tree/text?node={name}")).json()["text"]

    seen, text = asyncio.run(go())
    assert seen[0]["parent"] == [] and seen[0]["cached_tokens"] == 0 < seen[0]["total_tokens"]
    assert text == "common beginning, "
    last = seen[-1]
    assert last["tokens"][last["parent"].index(-1)] == len(text) and last["hits"][last["parent"].index(-1)] >= 1
    assert sum(last["tokens"]) == last["cached_tokens"] and last["locks"] == [0] * len(last["locks"])
    assert last["readers"] == [], "all have ended"


def test_a_timeline_goes_from_the_http_request_to_the_last_text() -> None:
    async def go() -> list[dict[str, Any]]:
        whole, recent = WholeEngine(), RecentRequests()
        whole.client._watchers = (recent,)
        context = dataclasses.replace(whole.context(), recent=recent)
        front = Front()
        front.open(App(all_endpoints(context), context.settings.server))
        transport = httpx.ASGITransport(app=front)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"text": "abc", "rid": "mine", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
            assert (await http.post("/generate", json=body)).status_code == 200
            answers = [await http.get("/ui/timeline", params={"rid": rid}) for rid in ("mine", "other")]
            return [answer.json()["replicas"][0] for answer in answers]

    mine, other = asyncio.run(go())
    (request,) = mine["requests"]
    assert mine["found"] == request["id"] and other["found"] is None and "mine" not in json.dumps(mine)
    names = [name for name, _, _ in request["stages"]]
    assert names == ["tokenise", "hand over", "queued", "prefill", "decode", "detokenise"]
    times = [request["arrived"], *(end for _, end, _ in request["stages"])]
    assert times == sorted(times) and request["finish"] == "length" and len(mine["steps"]) == 3
