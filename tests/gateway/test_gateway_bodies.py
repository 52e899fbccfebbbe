"""Bodies: bounded each and all together, counted as they come, and looked into without holding anybody up."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.errors import SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway import app as app_module
from bough.gateway import bodies as bodies_module
from bough.gateway.bodies import INSIDE_FIELD, MOST_OF_FIELD, STEP, TURN, WINDOW, Bodies, _excerpt, excerpt_of
from bough.gateway.peek import (
    FIELDS,
    LARGE,
    MEDIA_MARK,
    MOST_IDS,
    MOST_INSIDE,
    MOST_VALUES,
    _words,
    peek,
    read_response_fields,
)
from bough.gateway.resume import ResumableText
from bough.server.errors import HttpError
from bough.server.held_bodies import MIB, HeldBody
from tests.fakes.gateways import desk, until
from tests.fakes.workers import FakeWorker, workers


def values(*names: str) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | st.integers(0, 9) | st.text('ab"\\{}[],:é🌳 ', max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner),
        max_leaves=8,
    )


NAMES = ["model", "stream", "priority", "messages", "system", "prompt", "input_ids", "other", 'qu"ote']


def excerpt(body: bytes) -> bytes:
    return asyncio.run(excerpt_of(body))


# ---- looking into them


@given(
    fields=st.dictionaries(st.sampled_from(NAMES), values("role", "content", "x")),
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
    window=st.sampled_from([2, 5, WINDOW]),
)
@settings(deadline=None)
def test_an_excerpt_says_what_its_body_says(
    fields: dict[str, Any], indent: int | None, ascii_only: bool, window: int
) -> None:
    body = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies_module, "WINDOW", window)
        assert peek(excerpt(body), {}) == peek(body, {})


@given(
    body=st.binary(max_size=30)
    | st.text('{}[]",:\\ model', max_size=30).map(lambda text: b'{"model": ' + text.encode())
)
@settings(deadline=None)
def test_what_is_no_json_has_an_end_all_the_same(body: bytes) -> None:
    peek(excerpt(body), {})


@given(messages=st.lists(values("content", "x"), min_size=1, max_size=5), most=st.integers(4, 60))
@settings(deadline=None)
def test_a_long_field_is_cut_where_a_value_ends(messages: list[Any], most: int) -> None:
    body = json.dumps({"messages": messages, "model": "m"}).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies_module, "MOST_OF_FIELD", most)
        cut = excerpt(body)
    seen, whole = peek(cut, {}), peek(body, {})
    assert json.loads(cut)["model"] == seen.model == "m"
    assert whole.routing.text.startswith(seen.routing.text)


def test_the_beginning_of_a_large_prompt_counts() -> None:
    text = "word " * LARGE
    for fields in ({"prompt": text}, {"messages": [{"role": "user", "content": "hello"}, {"content": text}]}):
        seen = peek(excerpt(json.dumps({**fields, "model": "m"}).encode()), {})
        whole = peek(json.dumps(fields).encode(), {})
        assert seen.model == "m" and seen.routing.text and len(seen.routing.text) <= MOST_OF_FIELD
        assert whole.routing.text.startswith(seen.routing.text.rstrip("\n"))
    ids = peek(excerpt(json.dumps({"input_ids": list(range(300_000)), "model": "m"}).encode()), {}).routing.token_ids
    assert ids is not None and ids == tuple(range(len(ids))) and len(ids) > 10_000
    ids = peek(json.dumps({"input_ids": [1] * (2 * MOST_IDS)}).encode(), {}).routing.token_ids
    assert ids == (1,) * MOST_IDS


BODIES = {
    "a picture": b'{"prompt": "%s", "model": "m"}' % (b"x" * 4 * MIB),
    "escapes": b'{"prompt": "%s", "model": "m"}' % (b"\\\\n" * MIB),
    "numbers": b'{"prompt": [%s1], "model": "m"}' % (b"12," * MIB),
    "lists": b'{"prompt": [%s1], "model": "m"}' % (b"[1111111111]," * (MIB // 12)),
    "garbage": b"{" + b"x" * 4 * MIB,
}


@pytest.mark.parametrize("kind", BODIES)
def test_others_get_their_turn_while_a_large_body_is_looked_into(kind: str) -> None:
    body = BODIES[kind]
    steps = list(_excerpt(body))
    assert len(body) / 2 < sum(steps) and max(steps) <= WINDOW + STEP  # all of it, a little at a time

    async def main() -> None:
        bodies = Bodies(GatewaySettings())
        looking = asyncio.create_task(bodies.excerpt(body))
        turns = 0
        while not looking.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= sum(steps) // (TURN + WINDOW + STEP)
        assert peek(looking.result(), {}).model == (None if kind == "garbage" else "m")

    asyncio.run(main())


class Counted(list[Any]):
    """Counts how many of its values anybody has asked for."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            Counted.asked += 1
            yield value


@pytest.mark.parametrize("value", ["", 1, {}, [], {"source": {}}, {"images": [""]}, {"content": [{}]}], ids=str)
@pytest.mark.parametrize("media", [False, True])
def test_routing_looks_at_the_first_values_alone(value: Any, media: bool) -> None:
    for many in (Counted([value] * 50_000), [Counted([value] * 500) for _ in range(100)]):
        Counted.asked = 0
        text = _words(many, media=media)
        assert 0 < Counted.asked <= MOST_VALUES and len(text) <= 60 * MOST_VALUES


def test_the_first_words_count() -> None:
    many = [{"role": "user", "content": f"word {number}"} for number in range(50_000)]
    text = _words(many)
    assert text.startswith("user\nword 0\nuser\nword 1\n") and 1000 < text.count("\n") < MOST_VALUES


@pytest.mark.parametrize("inside", ["{}", "[]", '{"source":{}}', "[[]]", '{"content":[{}]}'])
def test_small_bodies_of_very_many_values_are_not_decoded_whole(inside: str, monkeypatch: Any) -> None:
    decoded: list[int] = []

    def noting(body: bytes, headers: Any) -> Any:
        decoded.append(body.count(b"{") + body.count(b"["))
        return peek(body, headers)

    monkeypatch.setattr(app_module, "peek", noting)

    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            body = b'{"messages": [%s], "model": "tiny"}' % ",".join([inside] * MOST_INSIDE).encode()
            assert len(body) < 1.2 * LARGE
            assert (await d.call("POST", "/v1/chat/completions", data=body))[0] == 200
            assert fake.requests[-1][2] == json.loads(body)

    asyncio.run(main())
    assert len(decoded) == 1 and decoded[0] <= INSIDE_FIELD + 3


def test_of_each_field_only_so_many_values_are_decoded() -> None:
    field = f"[{','.join(['[]'] * (2 * INSIDE_FIELD))}]"
    fields = ", ".join(f'"{name}": {field}' for name in FIELDS - {"model"})
    cut = excerpt(b'{%s, "model": "m"}' % fields.encode())
    assert cut.count(b"[") <= len(FIELDS) * (INSIDE_FIELD + 1) and json.loads(cut)["model"] == "m"


def test_many_brackets_in_a_text_cut_nothing_off() -> None:
    code = "{[" * MOST_INSIDE + " the end"
    for fields in ({"prompt": code}, {"messages": [{"role": "user", "content": code}]}):
        body = json.dumps({**fields, "model": "m"}).encode()
        assert peek(excerpt(body), {}) == peek(body, {})


def picture(letter: str, size: int = 2 * LARGE) -> str:
    return f"data:image/png;base64,{letter * size}"


SHAPES: list[Any] = [
    lambda data: {"messages": [{"role": "user", "content": [{"image_url": {"url": data}}, {"text": "Who?"}]}]},
    lambda data: {"messages": [{"role": "user", "content": "Who?", "images": [data]}]},
    lambda data: {"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": data}}]}]},
    lambda data: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data}]}]},
    lambda data: {"messages": [{"role": "user", "content": [{"input_audio": {"data": data, "format": "wav"}}]}]},
    lambda data: {"text": "<image> Who?", "image_data": [data]},
    lambda data: {"input_ids": [[1, 2]], "video_data": [[{"path": data, "num_frames": 4}]]},
    lambda data: {"prompt": "Who?", "images": [data]},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_images_are_digests_in_the_text_that_routes(shape: Any) -> None:
    """The same digest in small and in large bodies, and what follows an image counts."""

    def text(data: str) -> str:
        body = json.dumps({"model": "m", **shape(data)}).encode()
        routing = peek(excerpt(body), {}).routing
        assert routing.token_ids is None, "an engine has other ids in the places of media"
        assert peek(body, {}).routing.text == routing.text
        return routing.text

    for size in (200, 2 * LARGE):
        first, second = text(picture("a", size)), text(picture("b", size))
        assert first == text(picture("a", size)) != second
        assert len(first) < 80 and MEDIA_MARK in first
        assert ("Who?" in first) == ("Who?" in json.dumps(shape("")))
    assert text("https://example.org/a.png") != text("https://example.org/b.png")


def test_long_words_are_no_files() -> None:
    prose = "word " * LARGE
    assert peek(excerpt(json.dumps({"prompt": prose}).encode()), {}).routing.text.startswith("word word ")


def test_large_bodies_are_looked_into_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        running = most = 0

        async def noting(body: bytes) -> bytes:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return b"{}"

        monkeypatch.setattr(bodies_module, "excerpt_of", noting)
        bodies = Bodies(GatewaySettings())
        await asyncio.gather(*(bodies.excerpt(b" " * (LARGE + 1)) for _ in range(5)))
        assert most == 1

    asyncio.run(main())


def test_a_body_of_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "MOST_STEPS", 1000)

    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            many = json.dumps({"prompt": [[]] * (LARGE // 3), "model": "tiny"}).encode()
            status, answer = await d.call("POST", "/v1/completions", data=many)
            assert status == 413 and "fewer" in answer["error"]["message"] and not fake.requests
            assert (await d.post("/v1/completions", {"prompt": "x" * 2 * LARGE, "model": "tiny"}))[0] == 200
            assert fake.requests[-1][2] == {"prompt": "x" * 2 * LARGE, "model": "tiny"}

    asyncio.run(main())


def test_large_answers_are_not_decoded() -> None:
    filler = b'"' + b"x" * LARGE + b'"'
    assert read_response_fields(b'{"id": "a", "x": %s}\n' % filler) is not None
    assert read_response_fields(b"\n [%s]" % filler) is not None
    assert read_response_fields(b"nothing " + filler) is None and read_response_fields(b'{"id": %s' % filler) is None


@pytest.mark.parametrize("body", [b"{}", b' { "prompt": "x{" } \n', b'{"resume": {"seed": 3}, "prompt": "}"}'])
def test_a_resumed_body_is_the_original_with_one_field_more(body: bytes) -> None:
    text = ResumableText()
    text.feed(b': ids 5\ndata: {"id": "a", "created": 7}\n\n')
    resumed = json.loads(text.body(body))
    assert resumed == {**json.loads(body), "resume": {"output_ids": [5], "id": "a", "created": 7}}


# ---- how much of them


def small_room(**given: Any) -> Bodies:
    bodies = Bodies(GatewaySettings(**given))
    bodies.room = 8 * LARGE
    return bodies


def pieces(*sizes: int, more: bool = False) -> Any:
    """What an ASGI server gives of a body that comes in pieces; with `more` its end never comes."""
    waiting = [{"type": "http.request", "body": b" " * size, "more_body": True} for size in sizes]
    waiting[-1]["more_body"] = more

    async def receive() -> Any:
        return waiting.pop(0) if waiting else await asyncio.Event().wait()

    return receive


def refused(held: HeldBody, receive: Any, length: int | None = None, most: int = 64 * MIB) -> tuple[int, str]:
    headers = [] if length is None else [(b"content-length", str(length).encode())]
    with pytest.raises(HttpError) as caught:
        asyncio.run(held.read({"headers": headers}, receive, most))
    assert caught.value.failure.headers["Connection"] == "close"
    if caught.value.failure.status == 503:
        assert caught.value.failure.headers["Retry-After"]
    return caught.value.failure.status, caught.value.failure.message


def test_bodies_are_counted_while_they_are_held() -> None:
    bodies = small_room()
    one, two = HeldBody(bodies), HeldBody(bodies)
    asyncio.run(one.read({"headers": []}, pieces(LARGE, LARGE, 5), 64 * MIB))
    asyncio.run(two.read({"headers": []}, pieces(7), 64 * MIB))
    assert bodies.held == 2 * LARGE + 12
    one.release()
    one.release()
    assert bodies.held == 7
    two.release()
    assert bodies.held == 0


def test_a_body_that_finds_no_room_is_refused_and_small_ones_find_some() -> None:
    bodies = small_room()
    held = [HeldBody(bodies) for _ in range(3)]
    for each in held:
        asyncio.run(each.read({"headers": []}, pieces(2 * LARGE), 64 * MIB))
    late = HeldBody(bodies)
    assert refused(late, pieces(0), length=2 * LARGE)[0] == 503  # at once
    assert bodies.held == 6 * LARGE
    status, message = refused(late, pieces(LARGE, LARGE))  # as its second piece comes
    assert status == 503 and "--max-bodies-mb" in message
    late.release()
    assert bodies.held == 6 * LARGE
    for _ in range(2):
        asyncio.run(HeldBody(bodies).read({"headers": []}, pieces(LARGE), 64 * MIB))
    assert refused(HeldBody(bodies), pieces(LARGE))[0] == 503  # that is all


def test_one_body_is_bounded_before_it_is_read_and_while_it_comes() -> None:
    held = HeldBody(small_room())
    assert refused(held, pieces(0), length=MIB + 1, most=MIB)[0] == 413
    assert refused(held, pieces(MIB, 1), most=MIB)[0] == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/workers"])
def test_a_body_that_comes_too_slowly_is_given_up(path: str) -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake, body_timeout_s=1.0) as d:

            async def slow() -> AsyncIterator[bytes]:
                while True:
                    yield b" "
                    await asyncio.sleep(0.02)

            async with d.client.post(d.url + path, data=slow()) as refused:
                assert refused.status == 408 and refused.headers["Connection"] == "close"
                assert "within 1 s (--body-timeout-s)" in (await refused.json())["error"]["message"]
            await until(lambda: not d.gateway.bodies.held)

    asyncio.run(main())


def test_room_must_be_left_for_the_largest() -> None:
    with pytest.raises(SettingsError, match="--max-bodies-mb must be at least twice"):
        Bodies(GatewaySettings(max_body_mb=100, max_bodies_mb=150))
    assert Bodies(GatewaySettings()).room == 1024 * MIB


def test_what_the_gateway_holds_goes_with_the_request() -> None:
    async def main() -> None:
        async with workers(FakeWorker(mode="slow")) as (fake,), desk(fake) as d:
            d.gateway.bodies.room = 8 * LARGE
            body = {"prompt": "x" * 5 * LARGE}
            first = asyncio.create_task(d.post("/v1/completions", body))
            await until(lambda: fake.running == 1)
            assert d.gateway.bodies.held > 5 * LARGE
            async with d.client.post(d.url + "/v1/completions", json=body) as late:
                assert late.status == 503 and late.headers["Retry-After"]

            async def unannounced() -> AsyncIterator[bytes]:
                for _ in range(8):
                    yield b" " * LARGE

            assert (await d.call("POST", "/v1/completions", data=unannounced()))[0] == 503
            first.cancel()
            await until(lambda: d.gateway.bodies.held == 0)
            fake.mode = "ok"
            assert (await d.post("/v1/completions", body))[0] == 200
            assert (await d.post("/workers", {"url": "x" * 2 * MIB}))[0] == 413
            assert (await d.call("GET", "/health", data=b" " * 2 * MIB))[0] == 413

    asyncio.run(main())


def test_bodies_with_images_pass_unchanged_and_equal_images_go_together() -> None:
    paths = ("/v1/chat/completions", "/api/chat", "/v1/messages", "/v1/responses", "/v1/chat/completions", "/generate")
    pictures = [picture(letter, 3000) for letter in "abcdef"]

    async def main() -> None:
        fakes = [FakeWorker(), FakeWorker()]
        async with workers(*fakes), desk(*fakes, policy="cache_aware") as d:
            for path, shape in zip(paths, SHAPES, strict=False):
                for fake in fakes:
                    fake.requests.clear()
                sent = [{"model": "tiny", "max_tokens": 2, **shape(data)} for data in pictures * 3]
                for body in sent:
                    assert (await d.post(path, body))[0] == 200
                got = [[json.dumps(body) for _, _, body in fake.requests] for fake in fakes]
                assert sorted(got[0] + got[1]) == sorted(map(json.dumps, sent))
                assert not set(got[0]) & set(got[1]), "an image has one worker"

    asyncio.run(main())


def test_a_client_that_sends_all_before_it_reads_finds_its_early_response() -> None:
    body = b"x" * (8 * MIB)

    def client(port: int, target: str, key: str) -> bytes:
        head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    async def main() -> None:
        async with workers(FakeWorker()) as [fake], desk(fake, api_keys=("tenant",), max_body_mb=1) as d:
            port, key = int(d.url.rpartition(":")[2]), "X-Api-Key: tenant\r\n"
            for target, sent, status in (
                ("/v1/completions", "", b"401"),
                ("/workers", key, b"403"),
                ("/nothing", key, b"404"),
                ("/v1/completions", key, b"413"),
            ):
                raw = await asyncio.to_thread(client, port, target, sent)
                assert raw.startswith(b"HTTP/1.1 " + status) and b"connection: close" in raw, raw[:100]
            assert not fake.requests

    asyncio.run(main())


def test_management_refuses_what_is_nested_too_deep() -> None:
    async def main() -> None:
        async with workers(FakeWorker()) as [fake], desk(fake) as d:
            for deep in (b'{"policy": "random", "options": {"a": %s' % (b"[" * 500_000), b"\xff"):
                status, answer = await d.call("PUT", "/policies", data=deep)
                assert status == 400 and "not valid JSON" in answer["error"]["message"]

    asyncio.run(main())
