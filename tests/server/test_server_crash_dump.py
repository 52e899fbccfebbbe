"""The last requests, as they are kept and written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from bough.cli.replay import read_dump
from bough.server.app import App, Front
from bough.server.crash_dump import KEPT_S, RequestRecorder
from bough.server.protocols import all_endpoints
from tests.server.native_engine import NativeEngine


def test_requests_are_kept_for_some_minutes(tmp_path: Path) -> None:
    now = 0.0
    recorder = RequestRecorder(tmp_path / "new", clock=lambda: now)
    assert recorder.write("nothing came") is None
    recorder.add("/generate", b'{"text": "old"}')
    now = KEPT_S + 1
    recorder.add("/generate", '{"text":\r\n"fre\u2028sh"}'.encode()).finished = True
    written = recorder.write("killed")
    assert written is not None and written.stat().st_mode & 0o077 == 0
    (request,) = read_dump(written)
    assert request["body"] == {"text": "fre\u2028sh"} and request["finished"] and request["reason"] == "killed"


def test_the_server_records_what_clients_ask(tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path)

    async def go() -> None:
        context = NativeEngine(lambda m: None if m.rid == "runs" else [97]).context()
        front = Front()
        front.open(App(all_endpoints(context), context.settings.server, recorder))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://localhost") as http:
            await http.post("/generate", json={"text": "a"})
            await http.post("/generate", content=b"no JSON")
            await http.post("/flush_cache")
            running = asyncio.create_task(http.post("/generate", json={"text": "b", "rid": "runs"}))
            await asyncio.sleep(0.05)
            recorder.write("died")
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(go())
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["body"]["text"], line["finished"]) for line in lines] == [("a", True), ("b", False)]
