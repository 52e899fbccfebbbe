"""The load generators' HTTP client, against a server that misbehaves on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.bench.backends import HttpClient, HttpFailure, Record, RequestTemplate, read_native, read_openai
from bough.gateway.upstream_response import EventReader

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Play = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def playing(play: Play) -> AsyncIterator[tuple[HttpClient, list[int]]]:
    """A server that reads each request's head and has `play` answer; the list has a connection number for each."""
    seen: list[int] = []
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        number = connections
        connections += 1
        while not reader.at_eof() and not writer.is_closing():
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
            await reader.readexactly(length)
            seen.append(number)
            await play(len(seen), writer)

    async def forgiving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(forgiving, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=20)
    try:
        yield client, seen
    finally:
        client.close()
        server.close()


def test_connections_are_kept_and_replaced_when_the_server_closed_them() -> None:
    async def run() -> None:
        async def play(number: int, writer: asyncio.StreamWriter) -> None:
            writer.write(OK)
            if number == 2:
                await writer.drain()
                writer.close()

        async with playing(play) as (client, seen):
            for _ in range(2):
                assert (await client.post("/x", {"a": 1})).text == "ok"
            await asyncio.sleep(0.05)  # the server's goodbye arrives
            assert (await client.get("/x")).status == 200
            assert seen == [0, 0, 1]

    asyncio.run(run())


def test_a_stream_reaches_its_reader_and_an_error_does_not() -> None:
    async def run() -> None:
        async def play(number: int, writer: asyncio.StreamWriter) -> None:
            if number == 1:
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
                writer.write(b"2\r\nde\r\n0\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nbad")

        async with playing(play) as (client, _):
            seen: list[bytes] = []
            answer = await client.post("/x", {}, seen.append)
            assert (answer.status, answer.text, b"".join(seen)) == (200, "", b"abcde")
            answer = await client.post("/x", {}, seen.append)
            assert (answer.status, answer.text, len(seen)) == (400, "bad", 2)

    asyncio.run(run())


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b"SMTP ready\r\n"])
def test_a_broken_answer_is_a_failure(answer: bytes) -> None:
    async def run() -> None:
        async def play(number: int, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            writer.close()

        async with playing(play) as (client, _):
            with pytest.raises(HttpFailure):
                await client.get("/x")

    asyncio.run(run())


@given(st.lists(st.integers(1, 40), max_size=30))
def test_events_are_found_however_the_bytes_are_cut(cuts: list[int]) -> None:
    raw = b': keep-alive\n\ndata: {"a": 1}\n\ndata:{"b":2}\r\n\r\nevent: x\ndata: {"c": "d"}\n\ndata: [DONE]\n\n'
    reader, found, start = EventReader(), [], 0
    for cut in [*cuts, len(raw)]:
        found += reader.feed(raw[start : start + cut])
        start += cut
    assert found == [b'{"a": 1}', b'{"b":2}', b'{"c": "d"}']


def fresh() -> Record:
    return Record(0.0, prompt_tokens=7)


def test_tokens_that_come_together_share_their_gap() -> None:
    record = fresh()
    for tokens, now_s in ((1, 0.5), (3, 1.0), (3, 1.5), (4, 1.75)):
        read_native(
            record, b'{"text": "abc", "meta_info": {"completion_tokens": %d, "prompt_tokens": 9}}' % tokens, now_s
        )
    assert (record.first_s, record.total_s, record.gaps_s) == (0.5, 1.75, [0.25, 0.25, 0.75])
    assert (record.prompt_tokens, record.output_tokens, record.text) == (9, 4, "abc")


def test_openai_streams_are_joined_and_their_usage_believed() -> None:
    record = fresh()
    read_openai(record, b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', 0.1)
    read_openai(record, b'{"choices": [{"delta": {"reasoning_content": "hm"}}], "usage": null}', 0.5)
    read_openai(record, b'{"choices": [{"delta": {"content": "yes"}, "token_ids": [4, 5]}]}', 1.0)
    usage = b'{"prompt_tokens": 8, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 3}}'
    read_openai(record, b'{"choices": [], "usage": %s}' % usage, 1.1)
    assert (record.text, record.first_s, record.gaps_s) == ("hmyes", 0.5, [0.25, 0.25])
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (8, 3, 6)


@pytest.mark.parametrize("reader", [read_native, read_openai])
def test_an_error_in_a_stream_is_a_failure(reader: Callable[[Record, bytes, float], None]) -> None:
    with pytest.raises(HttpFailure, match="gone"):
        reader(fresh(), b'{"error": {"message": "gone"}}', 0.1)


def test_bodies_speak_each_api() -> None:
    native = RequestTemplate("native", "", extra={"sampling_params": {"top_p": 0.5}, "rid": "r"}).body([1, 2], 5)
    sampling = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True, "top_p": 0.5}
    assert native == {"input_ids": [1, 2], "sampling_params": sampling, "stream": True, "rid": "r"}
    whole = RequestTemplate("completions", "m", ignore_eos=False, stream=False).body("hi", 5)
    assert whole == {"model": "m", "prompt": "hi", "max_tokens": 5, "temperature": 0.0, "stream": False}
