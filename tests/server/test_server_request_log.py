"""`--log-requests`: what is logged at which level, and what never is."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from bough.core.finish import FinishAbort
from bough.server.tracing import SHOWN, RequestLog, RequestLogging
from tests.server.native_engine import NativeEngine, Play, open_server

SECRET = "k3y-of-the-house"


def lines(
    caplog: pytest.LogCaptureFixture, level: int, text: str, play: Play = (111, 107), rid: str = "r1"
) -> list[str]:
    async def go() -> None:
        engine = NativeEngine(lambda message: (97,) if message.rid.startswith("HEALTH_CHECK") else play)
        engine.watchers.append(RequestLog(RequestLogging(True, level), engine.tokenizer))
        async with open_server(engine, api_key=SECRET) as http:
            body = {"text": text, "rid": rid, "sampling_params": {"temperature": 0.25, "stop": ["stop-me"]}}
            await http.post("/generate", json=body, headers={"authorization": f"Bearer {SECRET}"})
            await http.get("/health_generate", headers={"x-api-key": SECRET})

    caplog.clear()
    with caplog.at_level(logging.DEBUG, "bough"):
        asyncio.run(go())
    assert SECRET not in caplog.text
    return [record.getMessage() for record in caplog.records if record.name == RequestLog.__module__]


def test_sizes_times_and_the_end_at_every_level(caplog: pytest.LogCaptureFixture) -> None:
    for level in range(4):
        came, ended = lines(caplog, level, "hello\nforged line")
        assert came.startswith("request 'r1' came: 17 prompt tokens")
        pattern = (
            r"request 'r1' ended \(stop\): 17 prompt tokens \(1 cached\), 2 output tokens, queue [\d.]+ ms, "
            r"prefill [\d.]+ ms, first token [\d.]+ ms, total [\d.]+ ms"
        )
        assert re.match(pattern, ended)
        assert ("'temperature': 0.25" in came) == ("stop-me" in came) == (level >= 1)
        assert (r"'hello\nforged line'" in came) == (level >= 2) and ("hello" in came) == (level >= 2)
        assert ended.endswith(", output 'ok'") == (level >= 2)


def test_long_texts_are_cut_below_level_three(caplog: pytest.LogCaptureFixture) -> None:
    cut, whole = (lines(caplog, level, "x" * (SHOWN + 5))[0] for level in (2, 3))
    assert "x" * SHOWN in cut and "x" * (SHOWN + 1) not in cut and "x" * (SHOWN + 5) in whole


def test_nobody_forges_a_line_with_an_id(caplog: pytest.LogCaptureFixture) -> None:
    assert all("\n" not in line for line in lines(caplog, 0, "a", rid="x\ny"))


def test_refusals_and_ids_without_a_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    assert "ended (QueueFullError 429)" in lines(caplog, 0, "a", FinishAbort("full", 429, "QueueFullError"))[1]

    async def go() -> None:
        engine = NativeEngine(lambda message: [7, 8])
        engine.watchers.append(RequestLog(RequestLogging(True, 2), None))
        await engine.client.answers(engine.reader.read(input_ids=[1, 2]))

    caplog.clear()
    with caplog.at_level(logging.INFO, "bough"):
        asyncio.run(go())
    assert "prompt [1, 2]" in caplog.messages[0] and "output [7, 8]" in caplog.messages[1]


def test_who_left_is_said_to_have_left(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: None)
        engine.watchers.append(RequestLog(RequestLogging(True, 0), None))
        task = asyncio.create_task(engine.client.answers(engine.reader.read(prompt="a")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level(logging.INFO, "bough"):
        asyncio.run(go())
    assert "ended (left by its client)" in caplog.messages[1]
