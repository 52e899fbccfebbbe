"""Streams whose workers fail again and again, cannot go on with them, or fall silent: each comes to its end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from tests.fakes.gateways import desk, until
from tests.fakes.workers import FakeWorker, text_of, tokens_of, workers


def events(raw: bytes) -> list[Any]:
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ") and line != b"data: [DONE]"]
    return [json.loads(line) for line in lines]


@dataclass
class Scripted(FakeWorker):
    """Answers every request with these pieces, then breaks the connection, falls silent or ends. With `fails_checks` it
    answers nothing else from the first request on."""

    pieces: tuple[bytes, ...] = ()
    pause_s: float = 0.01
    fails_checks: bool = False
    then: str = "end"
    kind: str = "text/event-stream"

    async def _work(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": self.kind})
        await response.prepare(request)
        if self.fails_checks:
            self.mode = "black_hole"
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(self.pause_s)
        if self.then == "break":
            assert request.transport is not None
            request.transport.abort()
        elif self.then == "silence":
            self.mode = "black_hole"
            await asyncio.sleep(3600)
        return response


@pytest.mark.parametrize(
    "pieces",
    [
        (b'data: {"error":{"type":"server_error","message":"out of order"}}\n\n',),
        (b': seed 1\ndata: {"role":1}\n\n', b'data: {"error":{"type":"server_error","message":"out of order"}}\n\n'),
        (b": seed 1\n: ids \ndata: {}\n\n",),
    ],
)
def test_a_stream_that_fails_everywhere_is_given_up(pieces: tuple[bytes, ...]) -> None:
    async def main() -> None:
        bad = [Scripted(pieces=pieces) for _ in range(2)]
        async with workers(*bad) as fakes, desk(*fakes, retry_max_retries=3, cb_failure_threshold=2) as d:
            raw = await d.stream({"prompt": "x"})
            assert "lost" in events(raw)[-1]["error"]["message"]
            assert sum(len(fake.requests) for fake in fakes) == 4
            assert {w.breaker.state(0.0).name for w in d.gateway.registry} == {"OPEN"}

    asyncio.run(main())


def test_a_stream_does_not_begin_anew_at_a_worker_that_cannot_go_on_with_it() -> None:
    async def main() -> None:
        ours, foreign = FakeWorker(die_after=2), FakeWorker(resumes=False)
        async with workers(ours, foreign) as fakes, desk(*fakes) as d:
            before, raw = 0, b""
            while not ours.requests:
                before = len(foreign.requests)
                raw = await d.stream({"prompt": "x", "max_tokens": 8})
            # Only one of them can go on, again and again; the other is asked at most once.
            assert len(foreign.requests) - before <= 1
            assert "".join(event["text"] for event in events(raw)) == text_of(tokens_of("x", 8))

    asyncio.run(main())


def test_where_nobody_can_go_on_with_a_stream_it_ends_with_an_error() -> None:
    async def main() -> None:
        ours, foreign = FakeWorker(pause_s=0.02), FakeWorker(resumes=False)
        async with workers(ours, foreign) as fakes, desk(*fakes) as d:
            worker = next(w for w in d.gateway.registry if w.url == ours.url)
            asked = asyncio.create_task(
                d.stream({"prompt": "x", "max_tokens": 1000}, headers={"X-SMG-Target-Worker": worker.id})
            )
            await until(lambda: ours.running)
            await asyncio.sleep(0.1)
            d.gateway.registry.remove(worker)
            await ours.stop()
            assert "lost" in events(await asked)[-1]["error"]["message"]
            assert len(foreign.requests) == 1
            assert next(iter(d.gateway.registry)).breaker.state(0.0).name == "CLOSED"
            await ours.start()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/responses", "/api/chat"])
def test_a_stream_of_another_path_is_not_told_twice(path: str) -> None:
    async def main() -> None:
        kind = "application/x-ndjson" if path == "/api/chat" else "text/event-stream"
        pieces = (
            (b'{"n": 0}\n', b'{"n": 1}\n') if path == "/api/chat" else (b'data: {"n": 0}\n\n', b'data: {"n": 1}\n\n')
        )
        bad = [Scripted(pieces=pieces, then="break", kind=kind) for _ in range(2)]
        async with workers(*bad) as fakes, desk(*fakes) as d:
            raw = await d.stream({"input": "x"}, path)
            assert raw.startswith(b"".join(pieces)) and raw.count(pieces[0]) == 1 and b"lost" in raw
            assert sum(len(fake.requests) for fake in fakes) == 1

    asyncio.run(main())


def test_lines_of_json_pass_as_they_come_on_any_path() -> None:
    async def main() -> None:
        lines = Scripted(pieces=(b'{"n": 0}\n',), then="silence", kind="application/x-ndjson")
        async with workers(lines) as fakes, desk(*fakes) as d:
            response = await d.client.post(d.url + "/generate", json={"stream": True})
            assert await response.content.readany() == b'{"n": 0}\n'
            response.close()

    asyncio.run(main())


def test_a_foreign_stream_whose_worker_hangs_ends_with_an_error() -> None:
    async def main() -> None:
        foreign = Scripted(pieces=(b'data: {"n": 0}\n\n',), then="silence")
        async with workers(foreign) as fakes, desk(*fakes) as d:
            raw = await d.stream({"prompt": "x"})
            assert events(raw)[0] == {"n": 0} and "health checks" in events(raw)[-1]["error"]["message"]

    asyncio.run(main())


def test_a_foreign_stream_that_goes_on_is_left_to_a_worker_that_fails_its_checks() -> None:
    async def main() -> None:
        pieces = tuple(b'data: {"n": %d}\n\n' % n for n in range(20))
        foreign = Scripted(pieces=pieces, pause_s=0.15, fails_checks=True)
        async with workers(foreign) as fakes, desk(*fakes) as d:
            raw = await d.stream({"prompt": "x"})
            assert not any(worker.in_rotation for worker in d.gateway.registry)
            assert events(raw) == [{"n": n} for n in range(20)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("text/event-stream", (b'data: {"n": 1}\n\nda', b'ta: {"n": 2}\n', b'\ndata: {"n')),
        ("application/x-ndjson", (b'{"n": 1}\n{"n"', b': 2}\n{"n')),
    ],
)
def test_half_an_event_is_not_told_before_the_error(kind: str, pieces: tuple[bytes, ...]) -> None:
    async def main() -> None:
        async with workers(Scripted(kind=kind, pieces=pieces, then="break")) as (fake,), desk(fake) as d:
            raw = await d.stream({"input": "x"}, "/v1/responses")
            lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line]
            first, second, last = map(json.loads, lines)
            assert (first["n"], second["n"]) == (1, 2) and "lost" in last["error"]["message"]
            assert d.gateway.metrics.failovers[()] == 0
        async with workers(Scripted(kind=kind, pieces=pieces)) as (fake,), desk(fake) as d:
            assert await d.stream({"input": "x"}, "/v1/responses") == b"".join(pieces)

    asyncio.run(main())


def test_a_line_without_end_goes_out_in_parts() -> None:
    async def main() -> None:
        pieces = (b"data: " + b"x" * 40_000, b"y" * 40_000, b"z")
        body = {"input": "x", "stream": True}
        async with (
            workers(Scripted(pieces=pieces, then="silence")) as (fake,),
            desk(fake) as d,
            asyncio.timeout(20),
            d.client.post(d.url + "/v1/responses", json=body) as response,
        ):
            assert await response.content.readexactly(80_006) == b"".join(pieces[:2])

    asyncio.run(main())
