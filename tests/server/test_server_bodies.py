"""Bodies of extreme shapes: what they cost, and what the log shows of them."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import RequestError, SettingsError
from bough.core.server_settings import ServerSettings
from bough.server import bodies
from bough.server.app import App
from bough.server.bodies import LARGE, count_values, decode_body, read_bytes
from bough.server.endpoint import Endpoint
from bough.server.held_bodies import server_room
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


JSON = st.recursive(
    st.none() | st.integers(0, 9) | st.text('ab"\\{}[],:é ', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\:', max_size=3), inner, max_size=3),
    max_leaves=8,
)


def counted(value: Any) -> tuple[int, int]:
    """Fields, lists and objects, and the commas between values."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    fields = 1 + (len(value) if isinstance(value, dict) else 0) + sum(fields for fields, _ in inner)
    return fields, max(0, len(value) - 1) + sum(values for _, values in inner)


@given(value=JSON, piece=st.sampled_from([2, 3, 7, 1 << 16]), escaped=st.booleans())
@settings(deadline=None)
def test_values_are_counted_whatever_strings_hold(value: Any, piece: int, escaped: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE", piece)
        assert asyncio.run(count_values(json.dumps(value, ensure_ascii=escaped).encode())) == counted(value)


@given(raw=st.text('"\\a,', max_size=20), piece=st.sampled_from([2, 3]))
@settings(deadline=None)
def test_counting_comes_to_an_end_whatever_it_gets(raw: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE", piece)
        asyncio.run(count_values(raw.encode()))


CODE = 'if (a[i] == "x") { return [1, 2, {"b": c}], "d\\\\"; }\n' * 60


@pytest.mark.parametrize(
    "body",
    [
        {"text": [CODE] * 10_000},
        {"input_ids": [12345] * 1_000_000},
        {"text": "a", "sampling_params": {"logit_bias": {str(i): 1 for i in range(1 << 18)}}},
    ],
)
def test_a_large_body_that_somebody_needs_is_taken(body: dict[str, Any]) -> None:
    raw, turns = json.dumps(body).encode(), 0

    async def go() -> None:
        nonlocal turns
        counting = asyncio.create_task(count_values(raw))
        while not counting.done():
            turns += 1
            await asyncio.sleep(0)
        await counting

    asyncio.run(go())
    assert turns > len(raw) >> 16, "others have their turns meanwhile"
    assert decode_body(raw, GenerateBody) is not None


@pytest.mark.parametrize(
    "raw",
    [
        b"{" + b",".join(b'"%x": 0' % i for i in range(1 << 19)) + b"}",
        b'{"messages": [' + b"{}," * 600_000 + b"{}]}",
        b'{"prompt": [' + b"1.0," * 2_200_000 + b"1.0]}",
        b'{"prompt": [' + b'"",' * 2_200_000 + b'""]}',
    ],
)
def test_millions_of_values_are_refused_before_they_are_decoded(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(raw) > LARGE
    monkeypatch.setattr(bodies, "decode_body", lambda *given: pytest.fail("it was decoded"))

    async def go() -> tuple[int, str]:
        async with open_server(NativeEngine(lambda message: [97])) as http:
            answer = await http.post("/v1/chat/completions", content=raw)
            return answer.status_code, answer.json()["error"]["message"]

    status, message = asyncio.run(go())
    assert status == 413 and "more than 524288 fields" in message and "send fewer in one request" in message


def test_few_floats_are_looked_at_for_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_FLOATS", 3)
    assert decode_body(b'{"input_ids": [1.0, 2.0, 3.0]}', GenerateBody).input_ids == [1, 2, 3]
    with pytest.raises(msgspec.ValidationError, match=r"got `float` - at `.*input_ids"):
        decode_body(b'{"input_ids": [1.0, 2.0, 3.0, 4.0]}', GenerateBody)


def test_all_bodies_together_are_bounded_until_their_responses_end() -> None:
    """Many of the largest size at once would take all memory; small ones still find room."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: Request) -> Response:
        size = len(await read_bytes(request))
        if size > LARGE:
            begun.set()
            await go_on.wait()
        return Response(f"{size} bytes")

    async def play() -> None:
        app = App([Endpoint("/hold", hold, "")], ServerSettings(max_body_mb=2, max_bodies_mb=4))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            first = asyncio.create_task(http.post("/hold", content=b"x" * 2 * LARGE))
            await begun.wait()
            late = await http.post("/hold", content=b"x" * (LARGE + 1))
            assert late.status_code == 503 and late.headers["Retry-After"] == "1"
            assert late.json()["error"]["message"] == (
                "The server holds as many bodies as it may (--max-bodies-mb); try again soon."
            )
            assert (await http.post("/hold", content=b"x" * LARGE)).status_code == 200
            go_on.set()
            assert (await first).text == f"{2 * LARGE} bytes" and app.bodies.held == 0
            assert (await http.post("/hold", content=b"x" * 2 * LARGE)).status_code == 200

    asyncio.run(play())


def test_the_room_for_bodies_fits_the_largest_ones() -> None:
    assert server_room(ServerSettings()).room == 1024 * LARGE
    assert server_room(ServerSettings(max_body_mb=1000)).room == 2000 * LARGE
    with pytest.raises(SettingsError, match="--max-bodies-mb must be at least twice"):
        server_room(ServerSettings(max_bodies_mb=100))
