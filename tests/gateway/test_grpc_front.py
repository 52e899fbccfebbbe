"""The gRPC front before a scripted HTTP application, and before a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tests.fakes.gateways import until

grpc = pytest.importorskip("grpc")

from bough.core.errors import SettingsError  # noqa: E402
from bough.core.gateway_settings import GatewaySettings  # noqa: E402
from bough.gateway.grpc import front  # noqa: E402
from bough.gateway.grpc.front import serving_grpc  # noqa: E402
from bough.gateway.grpc.messages import (  # noqa: E402
    SERVICE,
    GenerateReply,
    GenerateRequest,
    HealthReply,
    HealthRequest,
    protos,
)
from tests.bench.gateway_simulation import Costs  # noqa: E402
from tests.bench.gateway_worker import MODEL, Exchange, StandIn, WorkerSpec  # noqa: E402
from tests.fakes.certificates import make_certificate  # noqa: E402
from tests.fakes.gateways import PATIENCE_S, desk  # noqa: E402
from tests.fakes.workers import FakeWorker, workers  # noqa: E402

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


def chunk(text: str, ids: list[int], finish: str | None = None) -> dict[str, Any]:
    return {"id": "cmpl-1", "model": "m", "choices": [{"text": text, "token_ids": ids, "finish_reason": finish}]}


class ScriptedApp:
    """Answers every request with the same status and pieces, and remembers what it was asked."""

    def __init__(self, *pieces: bytes, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.pieces = pieces
        self.status = status
        self.headers = headers
        self.path = ""
        self.asked: dict[str, Any] = {}
        self.given: dict[bytes, bytes] = {}
        self.hangs = False
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.path, self.asked = scope["path"], json.loads(body) if body else {}
        self.given = dict(scope["headers"])
        await send({"type": "http.response.start", "status": self.status, "headers": list(self.headers)})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if self.hangs:
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Client:
    """The three methods, as a client calls them."""

    def __init__(self, channel: Any) -> None:
        self.generate = self._method(channel.unary_unary, "Generate", GenerateReply)
        self.stream = self._method(channel.unary_stream, "GenerateStream", GenerateReply)
        self.health = self._method(channel.unary_unary, "Health", HealthReply)

    @staticmethod
    def _method(kind: Any, name: str, reply: Any) -> Any:
        return kind(
            f"/{SERVICE}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=reply.FromString,
        )


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[Client]:
    async with (
        serving_grpc(app, GatewaySettings(grpc_port=0)) as (_, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield Client(channel)


def play(app: Any, story: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(app) as client:
            await story(client)

    asyncio.run(run())


def test_a_certificate_with_its_key_in_one_file_means_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())

    async def run() -> None:
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        async with (
            serving_grpc(ScriptedApp(), GatewaySettings(grpc_port=0, ssl_certfile=str(both))) as (_, port),
            grpc.aio.secure_channel(f"localhost:{port}", trusted) as secure,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain,
        ):
            assert await Client(secure).health(HealthRequest(), timeout=PATIENCE_S)
            with pytest.raises(grpc.aio.AioRpcError):
                await Client(plain).health(HealthRequest(), timeout=PATIENCE_S)

    asyncio.run(run())


def test_a_whole_answer() -> None:
    app = ScriptedApp(json.dumps({**chunk("Hello", [1, 2], "stop"), "usage": USAGE}).encode())

    async def story(client: Client) -> None:
        request = GenerateRequest(model="m", text="Say hello")
        request.sampling.max_tokens = 5
        request.sampling.temperature = 0.0
        request.sampling.stop.extend(["\n", "."])
        request.sampling.ignore_eos = False
        request.more["priority"] = 3
        request.more["logit_bias"] = {"5": -1.5}
        metadata = (("authorization", "Bearer k"), ("x-smg-routing-key", "s"), ("grpc-private", "x"))
        reply = await client.generate(request, metadata=metadata)
        assert (reply.id, reply.model, reply.text, list(reply.token_ids)) == ("cmpl-1", "m", "Hello", [1, 2])
        assert reply.finish_reason == "stop"
        usage = reply.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (7, 3, 2)

    play(app, story)
    assert app.path == "/v1/completions"
    assert app.asked == {
        "model": "m",
        "prompt": "Say hello",
        "stream": False,
        "return_token_ids": True,
        "max_tokens": 5,
        "temperature": 0.0,  # given, and not to be confused with left out
        "stop": ["\n", "."],
        "ignore_eos": False,
        "priority": 3,
        "logit_bias": {"5": -1.5},
    }
    assert app.given[b"authorization"] == b"Bearer k" and app.given[b"x-smg-routing-key"] == b"s"
    assert app.given[b"content-type"] == b"application/json" and b"grpc-private" not in app.given
    assert app.given[b"x-forwarded-for"] == b"127.0.0.1"


def test_a_stream_however_its_bytes_are_cut() -> None:
    events = [chunk("Hel", [1]), chunk("lo", [2], "stop"), {"id": "cmpl-1", "choices": [], "usage": USAGE}]
    raw = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    app = ScriptedApp(raw[:13], raw[13:90], raw[90:])

    async def story(client: Client) -> None:
        request = GenerateRequest()
        request.token_ids.ids.extend([5, 6])
        replies = [reply async for reply in client.stream(request)]
        assert [reply.text for reply in replies] == ["Hel", "lo", ""]
        assert [list(reply.token_ids) for reply in replies] == [[1], [2], []]
        assert replies[1].finish_reason == "stop" and replies[2].usage.cached_tokens == 3

    play(app, story)
    assert app.asked["prompt"] == [5, 6] and app.asked["stream_options"] == {"include_usage": True}
    assert "model" not in app.asked


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, grpc.StatusCode.INVALID_ARGUMENT),
        (401, grpc.StatusCode.UNAUTHENTICATED),
        (404, grpc.StatusCode.NOT_FOUND),
        (408, grpc.StatusCode.DEADLINE_EXCEEDED),
        (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (503, grpc.StatusCode.UNAVAILABLE),
        (500, grpc.StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_keeps_its_sentence(status: int, code: Any, streamed: bool) -> None:
    body = json.dumps({"error": {"message": "That is why.", "type": "Error"}}).encode()
    app = ScriptedApp(body, status=status, headers=((b"retry-after", b"2"),))

    async def story(client: Client) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if streamed:
                async for _ in client.stream(GenerateRequest(text="x")):
                    pytest.fail("nothing may come")
            else:
                await client.generate(GenerateRequest(text="x"))
        assert caught.value.code() is code and caught.value.details() == "That is why."
        assert ("retry-after", "2") in tuple(caught.value.trailing_metadata())

    play(app, story)


def test_a_stream_that_breaks_ends_with_the_reason() -> None:
    broken = b'data: {"error": {"message": "The worker is gone.", "type": "WorkerLostError"}}\n\n'
    app = ScriptedApp(b"data: " + json.dumps(chunk("a", [1])).encode() + b"\n\n", broken)

    async def story(client: Client) -> None:
        seen = []
        with pytest.raises(grpc.aio.AioRpcError, match=r"The worker is gone\."):
            async for reply in client.stream(GenerateRequest(text="x")):
                seen.append(reply.text)
        assert seen == ["a"]

    play(app, story)


@pytest.mark.parametrize("field", ["stream", "n", "prompt"])
def test_what_would_change_the_shape_of_the_answer_is_refused(field: str) -> None:
    async def story(client: Client) -> None:
        request = GenerateRequest(text="x")
        request.more[field] = 2
        with pytest.raises(grpc.aio.AioRpcError, match=f"more.{field} cannot be set"):
            await client.generate(request)
        with pytest.raises(grpc.aio.AioRpcError, match="Give a prompt"):
            await client.generate(GenerateRequest())

    play(ScriptedApp(), story)


def test_a_client_that_cancels_has_left() -> None:
    async def run() -> None:
        app = ScriptedApp(b"data: " + json.dumps(chunk("a", [1])).encode() + b"\n\n")
        app.hangs = True
        async with serving(app) as client:
            call = client.stream(GenerateRequest(text="x"))
            assert (await call.read()).text == "a"
            call.cancel()
            async with asyncio.timeout(10):
                await app.left.wait()

    asyncio.run(run())


def test_a_message_over_the_limit_is_refused_whatever_bodies_may_have() -> None:
    app = ScriptedApp(b"{}")

    async def story(client: Client) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate(GenerateRequest(text="x" * (5 << 20)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(app, story)


@pytest.fixture
def room_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors for four connections and four calls, however many the machine gives."""
    monkeypatch.setattr(front, "SHARE", resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


@pytest.mark.usefixtures("room_for_four")
def test_connections_that_say_nothing_leave_descriptors_for_http() -> None:
    async def run() -> None:
        async with serving_grpc(ScriptedApp(b"{}"), GatewaySettings(grpc_port=0)) as (_, port):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]

            async def closed(reader: asyncio.StreamReader) -> bool:
                with contextlib.suppress(ConnectionError):
                    while await reader.read(1024):  # the server begins with its settings
                        pass
                return True

            ends = [asyncio.create_task(closed(reader)) for reader, _ in opened]
            await until(lambda: sum(end.done() for end in ends) >= 12 - 5)
            assert not all(end.done() for end in ends)
            for end, (_, writer) in zip(ends, opened, strict=True):
                end.cancel()
                writer.close()

    asyncio.run(run())


@pytest.mark.usefixtures("room_for_four")
def test_more_calls_than_there_are_descriptors_for_are_refused_at_once() -> None:
    async def run() -> None:
        app = ScriptedApp(b"{")
        app.hangs = True
        async with serving(app) as client:
            calls = [asyncio.ensure_future(client.generate(GenerateRequest(text="x"))) for _ in range(10)]
            await until(lambda: sum(call.done() for call in calls) == 6)
            codes = [call.exception().code() for call in calls if call.done()]
            assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 6
            for call in calls:
                call.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(("code", "advice"), [(errno.EMFILE, "raise ulimit -n"), (errno.ECONNREFUSED, "try again")])
def test_a_call_without_a_connection_ends_with_a_sentence(
    code: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*given: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(front.HttpClient, "request", fail)

    async def story(client: Client) -> None:
        for call in (client.generate(GenerateRequest(text="x")), client.health(HealthRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert os.strerror(code) in caught.value.details() and advice in caught.value.details()

    play(ScriptedApp(b"{}"), story)


def test_health() -> None:
    async def story(client: Client) -> None:
        assert (await client.health(HealthRequest())).status == HealthReply.SERVING

    play(ScriptedApp(b"{}"), story)

    async def bad(client: Client) -> None:
        reply = await client.health(HealthRequest())
        assert reply.status == HealthReply.NOT_SERVING and reply.reason == "no worker is in rotation"

    play(ScriptedApp(b'{"status": "no worker is in rotation"}', status=503), bad)


def test_a_port_in_use_is_told() -> None:
    async def run() -> None:
        taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        with pytest.raises(SettingsError, match="--grpc-port"):
            async with serving_grpc(ScriptedApp(), GatewaySettings(grpc_port=taken.sockets[0].getsockname()[1])):
                pytest.fail("it cannot listen there")
        taken.close()

    asyncio.run(run())


def test_through_a_real_gateway() -> None:
    async def run() -> None:
        engine = StandIn(WorkerSpec("one", Costs(prefill_us=0, decode_ms=0, crowd_ms=0), None))
        server = await asyncio.get_running_loop().create_server(lambda: Exchange(engine), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with (
            desk(worker_urls=(url,), healthy=1, api_keys=("secret",)) as gateway,
            serving(gateway.front) as client,
        ):
            await until(lambda: gateway.gateway.registry.models() == [MODEL])
            request = GenerateRequest(model=MODEL, text="Once upon a time")
            request.sampling.max_tokens = 6
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate(request)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            key = (("authorization", "Bearer secret"),)
            whole = await client.generate(request, metadata=key)
            streamed = [reply async for reply in client.stream(request, metadata=key)]
            assert whole.text == "".join(reply.text for reply in streamed) and len(whole.text) == 24
            assert len(streamed) == 6 and whole.usage.prompt_tokens == 4
            assert (await client.health(HealthRequest())).status == HealthReply.SERVING
        server.close()

    asyncio.run(run())


def test_every_method_of_the_proto_is_served_with_its_messages() -> None:
    methods = protos.DESCRIPTOR.services_by_name["Gateway"].methods
    assert {method.name: method.server_streaming for method in methods} == {
        "Generate": False,
        "GenerateStream": True,
        "Health": False,
    }

    async def run() -> None:
        async with (
            serving_grpc(ScriptedApp(b"{}"), GatewaySettings(grpc_port=0)) as (_, port),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            for method in methods:
                request, reply = (getattr(protos, kind.name) for kind in (method.input_type, method.output_type))
                path = f"/{method.containing_service.full_name}/{method.name}"
                call = channel.unary_stream(path, request.SerializeToString, reply.FromString)
                given = request(text="x") if request is GenerateRequest else request()
                assert all([isinstance(each, reply) async for each in call(given, timeout=PATIENCE_S)])

    asyncio.run(run())


def test_a_call_whose_time_is_up_before_its_answer_stops_at_the_worker() -> None:
    async def main() -> None:
        async with workers(FakeWorker(mode="slow")) as (fake,), desk(fake) as d, serving(d.front) as client:
            with pytest.raises(grpc.aio.AioRpcError):
                await client.generate(GenerateRequest(text="x"), timeout=0.3)
            await until(lambda: fake.aborted == 1 and not any(worker.load for worker in d.gateway.registry))

    asyncio.run(main())
