"""The short way of a stream's events: the same bytes as by the long way, whatever the chunks, reads and clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast

import pytest

from bough.gateway.outlet import Outlet
from bough.server.http_protocol import HttpProtocol
from tests.fakes.gateways import desk, until
from tests.fakes.workers import FakeWorker, text_of, tokens_of, workers

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


def chunk(data: bytes, size: bytes = b"%x") -> bytes:
    return size % len(data) + b"\r\n%b\r\n" % data


def delta(number: int) -> bytes:
    return b'data: {"id":"c1","text":"%b"}\n\n' % (b"x" * number)


def ids(number: int) -> bytes:
    return b": ids %d\n" % number


@dataclass
class RawWorker:
    """Writes the prepared pieces of an answer one after the other, as they are."""

    pieces: list[bytes]
    url: str = ""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0))
                if not body:
                    listed = json.dumps({"data": [{"id": "tiny"}]}).encode()
                    writer.write(JSON % (len(listed), listed))
                    continue
                for piece in self.pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def raw_worker(*pieces: bytes) -> AsyncIterator[FakeWorker]:
    worker = RawWorker(list(pieces))
    server = await asyncio.start_server(worker.answer, "127.0.0.1", 0)
    worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield cast(FakeWorker, worker)
    finally:
        server.close()
        for writer in worker.writers:
            writer.transport.abort()
        await server.wait_closed()


@pytest.fixture()
def shortened(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What took the short way last, each time before something took the long one."""
    found: list[bytes] = []
    passed = Outlet.passed

    def noted(self: Outlet, last: bytes, sent: int) -> None:
        found.append(last)
        passed(self, last, sent)

    monkeypatch.setattr(Outlet, "passed", noted)
    return found


OWN = [b": seed 7\n" + ids(1) + delta(1), *(ids(n) + delta(n) for n in range(2, 8)), b"data: [DONE]\n\n"]
FOREIGN = [*map(delta, range(1, 8)), b"data: [DONE]\n\n"]
CHAT = [b"event: content_block_delta\n" + event for event in FOREIGN[:-1]] + [b"event: message_stop\ndata: {}\n\n"]
SHOWN = b"".join(FOREIGN)
END = b"0\r\n\r\n"
PING = b": keep-alive\n\n"


@pytest.mark.parametrize(
    ("events", "shown", "last"),
    [
        (OWN, SHOWN, delta(7)),
        (FOREIGN, SHOWN, delta(7)),
        (CHAT, b"".join(CHAT), CHAT[-1]),
        ([ids(n) + event for n, event in enumerate(CHAT[:-1])] + CHAT[-1:], b"".join(CHAT), CHAT[-2]),
        (
            [*OWN[:4], PING, b": events 2\n" + OWN[4] + FOREIGN[5], *OWN[6:]],
            SHOWN.replace(delta(5), PING + delta(5)),
            None,
        ),
        (
            [*FOREIGN[:4], PING, ids(9) + delta(5), *FOREIGN[5:]],
            SHOWN.replace(delta(5), PING + ids(9) + delta(5)),
            None,
        ),
        ([*FOREIGN[:4], b": half a line", b" and the rest\n", *FOREIGN[4:]], None, delta(7)),
        ([FOREIGN[0], *FOREIGN[1:5], delta(6) + delta(7), FOREIGN[-1]], None, delta(6) + delta(7)),
    ],
)
def test_one_event_in_one_read_takes_the_short_way(
    events: list[bytes], shown: bytes | None, last: bytes | None, shortened: list[bytes]
) -> None:
    async def main() -> None:
        async with raw_worker(HEAD, *map(chunk, events), END) as worker, desk(worker) as d:
            assert await d.stream({"prompt": "x"}) == (shown or b"".join(events))
            (logged,) = d.gateway.log.recent()
            assert logged["bytes"] == len(shown or b"".join(events))
        assert shortened[-1] == (last or delta(7))

    asyncio.run(main())


def test_any_reads_and_any_spelling_give_the_same_stream(shortened: list[bytes]) -> None:
    sizes = (b"%x", b"%x", b"%X", b"00%x", b"%x;name=value")
    drawn = random.Random(0)

    async def main() -> None:
        async with raw_worker() as worker, desk(worker) as d:
            for number in range(120):
                events = [OWN, FOREIGN, CHAT][number % 3]
                size = drawn.choice(sizes)
                whole = b"".join(chunk(event, size) for event in events)
                cuts = sorted({0, len(whole), *(drawn.randrange(len(whole)) for _ in range(drawn.randrange(12)))})
                cast(RawWorker, worker).pieces = [HEAD, *(whole[a:b] for a, b in itertools.pairwise(cuts)), END]
                if number % 2:  # whole chunks, and one that is cut
                    pieces = [chunk(event, size) for event in events]
                    at, cut = drawn.randrange(len(pieces)), drawn.randrange(1, 8)
                    pieces[at : at + 1] = [pieces[at][:cut], pieces[at][cut:]]
                    cast(RawWorker, worker).pieces = [HEAD, *pieces, END]
                assert await d.stream({"prompt": "x"}) == (b"".join(CHAT) if events is CHAT else SHOWN)
        assert len(shortened) > 20

    asyncio.run(main())


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_clients_of_http_1_0_get_no_chunks(version: str, shortened: list[bytes]) -> None:
    async def main() -> None:
        async with raw_worker(HEAD, *map(chunk, FOREIGN), END) as worker, desk(worker) as d:
            raw = await raw_client(d.url, version)
            assert (raw == SHOWN) is (version == "1.0") is not bool(shortened)

    asyncio.run(main())


async def raw_client(url: str, version: str = "1.1", *, wait: asyncio.Event | None = None) -> bytes:
    """The body as it comes, read from when the event is set."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = b'{"prompt": "x", "stream": true}'
    head = f"POST /v1/completions HTTP/{version}\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    if wait is not None:
        await wait.wait()
    raw = await reader.read(-1)
    writer.close()
    return raw.partition(b"\r\n\r\n")[2]


def test_a_client_that_does_not_keep_up_gets_everything_in_order(
    shortened: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [b'data: {"n":%d,"text":"%b"}\n\n' % (n, b"y" * 1900) for n in range(8000)]

    async def main() -> None:
        paused, before = asyncio.Event(), HttpProtocol.pause_writing

        def pause(self: HttpProtocol) -> None:
            before(self)
            paused.set()

        monkeypatch.setattr(HttpProtocol, "pause_writing", pause)
        pieces = (HEAD, *map(chunk, events[:40]), b"".join(map(chunk, events[40:])), END)
        async with raw_worker(*pieces) as worker, desk(worker) as d:
            raw = await raw_client(d.url, wait=paused)
        assert b"".join(raw.split(b"\r\n")[1::2]) == b"".join(events)
        assert shortened

    asyncio.run(main())


def test_a_stream_goes_on_elsewhere_with_the_tokens_of_the_short_way(shortened: list[bytes]) -> None:
    async def main() -> None:
        dying, good = FakeWorker(die_after=6, pause_s=0.002), FakeWorker(pause_s=0.002)
        async with workers(dying, good) as fakes, desk(*fakes) as d:
            while not dying.requests:
                raw = await d.stream({"prompt": "x", "max_tokens": 12})
            events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
            assert "".join(event["text"] for event in events) == text_of(tokens_of("x", 12))
            resumed = good.requests[-1][2]["resume"]["output_ids"]
            assert resumed == tokens_of("x", 6)
        assert shortened

    asyncio.run(main())


def test_the_workers_key_is_taken_out_on_the_short_way_too(shortened: list[bytes]) -> None:
    secret = "a-key-of-the-worker"
    events = [*FOREIGN[:5], b'data: {"text":"%b"}\n\n' % secret.encode(), *FOREIGN[5:]]

    async def main() -> None:
        pieces = (HEAD, *map(chunk, events), END)
        async with raw_worker(*pieces) as worker, desk(worker, worker_api_key=secret) as d:
            assert await d.stream({"prompt": "x"}) == b"".join(events).replace(secret.encode(), b"***")
        assert delta(5) in shortened

    asyncio.run(main())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("line", [0, 70_000])
def test_the_workers_key_is_taken_out_where_it_comes_in_two_pieces(own: bool, line: int) -> None:
    secret = b"a-key-of-the-worker"
    told = b'data: {"text":"%b%b%b"}\n\n' % (b"x" * line, secret, b"y" * line)
    events = [*(OWN if own else FOREIGN)[:3], (ids(4) if own else b"") + told, *(OWN if own else FOREIGN)[4:]]
    shown = b"".join([*FOREIGN[:3], told, *FOREIGN[4:]]).replace(secret, b"***")

    async def main() -> None:
        raw = b"".join(map(chunk, events))
        async with raw_worker() as worker, desk(worker, worker_api_key=secret.decode()) as d:
            for at in range(raw.index(secret), raw.index(secret) + len(secret)):
                cast(RawWorker, worker).pieces = [HEAD, raw[:at], raw[at:], END]
                assert await d.stream({"prompt": "x"}) == shown

    asyncio.run(main())


def test_a_client_that_leaves_on_the_short_way_ends_the_workers_stream(shortened: list[bytes]) -> None:
    async def main() -> None:
        worker = FakeWorker(pause_s=0.002)
        async with workers(worker), desk(worker) as d:
            body = {"prompt": "x", "max_tokens": 100_000, "stream": True}
            async with d.client.post(d.url + "/v1/completions", json=body) as response:
                for _ in range(20):
                    await response.content.readline()
            await until(lambda: worker.aborted)
            await until(lambda: not worker.running and not any(w.load for w in d.gateway.registry))
            assert await d.stream({"prompt": "y", "max_tokens": 3})
        assert shortened

    asyncio.run(main())


def test_a_client_that_takes_nothing_has_its_place_until_its_time_is_up() -> None:
    async def main() -> None:
        endless = [b"".join(map(chunk, [b'data: {"text":"%b"}\n\n' % (b"y" * 60_000)] * 1000))]
        async with raw_worker(HEAD, *endless, END) as worker, desk(worker, request_timeout_secs=1.0) as d:
            reading = asyncio.create_task(raw_client(d.url, wait=asyncio.Event()))
            await until(lambda: d.gateway.dispatch.active)
            await until(lambda: not d.gateway.dispatch.active)
            reading.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "kind", "event"),
    [
        ("/api/chat", b"application/x-ndjson", b'{"message":{"content":"a"}}\n'),
        ("/generate", b"text/event-stream", b'data: {"text":"a"}\n\n'),
        ("/v1/completions", b"text/event-stream", b'data: {"text":"a"}\n\n'),
        ("/v1/messages", b"text/event-stream", b'event: x\ndata: {"text":"a"}\n\n'),
    ],
)
def test_a_stream_that_breaks_ends_with_an_error_of_its_protocol(path: str, kind: bytes, event: bytes) -> None:
    async def main() -> None:
        head = HEAD.replace(b"text/event-stream", kind)
        async with raw_worker(head, chunk(event), chunk(event), b"no size\r\n") as worker, desk(worker) as d:
            raw = await d.stream({"prompt": "x"}, path)
        assert raw.startswith(2 * event)
        error = json.loads(raw.rstrip().rsplit(b"\n", 1)[-1].removeprefix(b"data: "))
        told = error["error"]["message"] if path != "/api/chat" else error["error"]
        assert "The worker was lost" in told
        assert (error.get("object") == "error") is (path == "/generate") and (error.get("type") == "error") is (
            path == "/v1/messages"
        )

    asyncio.run(main())


@pytest.mark.parametrize("begun", [b"", b": seed ", b": keep-alive\n\n", OWN[0]])
def test_a_stream_that_only_the_end_of_its_connection_ends_is_not_whole_without_its_last_event(begun: bytes) -> None:
    async def main() -> None:
        head = HEAD.replace(b"Transfer-Encoding: chunked", b"Connection: close")
        good = FakeWorker()
        async with raw_worker(head, b": x\n\n" + begun) as worker, workers(good), desk(worker, good) as d:
            (dying,) = [each for each in d.gateway.registry if each.url == worker.url]
            reading = [asyncio.create_task(d.stream({"prompt": "x", "max_tokens": 3})) for _ in range(2)]
            writers = cast(RawWorker, worker).writers
            await until(lambda: dying.load and all(task.done() for task in reading if not dying.load))
            await until(lambda: sum(task.done() for task in reading))  # that of the other worker
            for writer in writers:
                writer.close()
            for raw in await asyncio.gather(*reading):
                assert raw.endswith(b"data: [DONE]\n\n") and raw.count(b'"id"') == 3, raw

    asyncio.run(main())
