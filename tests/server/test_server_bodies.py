"""Bodies of extreme shapes: what they cost, and what the log shows of them."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest

from bough.server import bodies
from bough.server.bodies import decode_body
from bough.server.native.schemas import GenerateBody
from tests.server.native_engine import NativeEngine, open_server


def test_the_collector_does_not_run_while_millions_of_values_are_read() -> None:
    raw = b'{"input_ids": [' + b"[1]," * 400_000 + b"[1]]}"
    runs: list[str] = []

    def count(phase: str, info: dict[str, Any]) -> None:
        runs.append(phase)

    gc.callbacks.append(count)
    try:
        body = decode_body(raw, GenerateBody)
    finally:
        gc.callbacks.remove(count)
    assert body.input_ids is not None and len(body.input_ids) == 400_001
    assert len(runs) < 20 and gc.isenabled(), "hundreds, if nobody held it back"


def test_unknown_fields_fill_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_logged_fields", set())
    monkeypatch.setattr(logging.getLogger("bough"), "propagate", True)
    unknown = {f"{i}{'x' * 9999}": 1 for i in range(1100)}

    async def go() -> int:
        async with open_server(NativeEngine(lambda message: [97])) as http:
            return (await http.post("/api/show", json=unknown)).status_code

    assert asyncio.run(go()) == 200
    lines = [record.getMessage() for record in caplog.records if "is unknown" in record.getMessage()]
    assert len(lines) == 1000 and max(map(len, lines)) < 300
