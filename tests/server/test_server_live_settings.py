"""Routes that change or tell what a running engine is set to."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable

import httpx

from bough.messages.requests import ChangeSettings, ProcessCommand
from tests.server.native_engine import NativeEngine, open_server


def serve(scenario: Callable[[httpx.AsyncClient, NativeEngine], Awaitable[None]], **settings: object) -> None:
    async def go() -> None:
        engine = NativeEngine(lambda _: [97])
        async with open_server(engine, **settings) as http:
            await scenario(http, engine)

    asyncio.run(go())


def test_the_weight_version_is_told() -> None:
    async def scenario(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        assert (await http.get("/weight_version")).json() == {"weight_version": "default"}
        engine.state["weight_version"] = "step-7"
        assert (await http.get("/get_weight_version")).json() == {"weight_version": "step-7"}

    serve(scenario)


def test_live_settings_go_to_the_scheduler() -> None:
    async def scenario(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        given = {"max_queued_requests": 3, "waiting_timeout_s": 2}
        reply = await http.post("/set_internal_state", json={"server_args": given})
        assert reply.json() == {"updated": True}
        (command,) = engine.commands
        assert isinstance(command, ChangeSettings) and command.values == given

    serve(scenario)


def test_other_settings_and_bad_values_change_nothing() -> None:
    async def scenario(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        for given in ({"page_size": 2}, {"max_queued_requests": -1}, {"decode_log_interval": "often"}):
            reply = await http.put("/set_internal_state", json={"server_args": given})
            assert reply.status_code == 400 and reply.json()["updated"] is False
            assert next(iter(given)) in reply.json()["error"]["message"]
        assert not engine.commands

    serve(scenario)


def test_logging_is_configured_while_it_runs() -> None:
    root = logging.getLogger("bough")
    before, lines = root.level, list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    root.addHandler(handler)

    async def scenario(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        await http.get("/health")
        assert not lines
        body = {"log_requests": True, "log_requests_level": 0, "log_level": "info"}
        assert (await http.post("/configure_logging", json=body)).status_code == 200
        assert [c.log_level for c in engine.commands if isinstance(c, ProcessCommand)] == ["info"]
        lines.clear()
        await http.get("/health")
        assert any("/health" in line for line in lines)
        sglangs = {"dump_requests_folder": "/tmp/sglang_request_dump", "dump_requests_threshold": 1000}
        taken = await http.post("/configure_logging", json=sglangs)
        assert taken.status_code == 200 and "not dumped" in taken.json()["message"]
        empty = {"dump_requests_folder": "", "dump_requests_threshold": 1000}
        assert (await http.post("/configure_logging", json=empty)).json()["message"] == "Logging is configured."
        refused = await http.post("/configure_logging", json={"dump_requests_folder": "/tmp/x"})
        assert refused.status_code == 400 and "dump_requests_folder" in refused.json()["error"]["message"]

    try:
        serve(scenario)
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def test_garbage_is_frozen_in_all_processes() -> None:
    async def scenario(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        gc.unfreeze()
        assert (await http.post("/freeze_gc")).status_code == 200
        assert gc.get_freeze_count() > 0
        assert [c.freeze_gc for c in engine.commands if isinstance(c, ProcessCommand)] == [True]

    try:
        serve(scenario)
    finally:
        gc.unfreeze()
