"""Bodies of extreme shapes: what they cost, and what the log shows of them."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest

from bough.core.errors import RequestError
from bough.server import bodies
from bough.server.bodies import decode_body
from bough.server.native.schemas import GenerateBody, ProfileBody
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


def test_only_the_beginning_of_a_long_name_is_compared_with_known_ones() -> None:
    with pytest.raises(RequestError, match="Unknown field 'num_steq") as refused:
        decode_body(b'{"num_steq' + b"s" * 1_000_000 + b'": 1}', ProfileBody)
    assert len(refused.value.field or "") == bodies.NAME_SHOWN and len(str(refused.value)) < 300
