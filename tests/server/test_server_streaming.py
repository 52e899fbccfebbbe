"""Event streams at the level of ASGI: what is sent when, and what a client's absence does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from bough.core.errors import EngineDeadError, RequestError
from bough.messages.requests import Abort
from bough.server.app import App
from bough.server.errors import native_shape
from bough.server.protocols import all_endpoints
from bough.server.streaming import EventStream, json_event
from tests.server.native_engine import NativeEngine


class Wire:
    """A client as ASGI sees it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.gone = asyncio.Event()
        self.blocked = asyncio.Event()
        self.blocked.set()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.blocked.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def begun(self) -> None:
        while not self.sent:
            await asyncio.sleep(0)


async def play(*steps: Any) -> AsyncGenerator[bytes, None]:
    for step in steps:
        if isinstance(step, Exception):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
        else:
            yield step


def stream(events: AsyncGenerator[bytes, None], **options: Any) -> EventStream:
    return EventStream(events, lambda failure: json_event(native_shape(failure)), **options)


def test_events_go_out_in_order() -> None:
    async def go() -> None:
        wire = Wire()
        await stream(play(json_event(1), json_event(2)), headers=lambda: {"x-a": "b"})({}, wire.receive, wire.send)
        assert wire.body == b"data: 1\n\ndata: 2\n\n"
        assert (b"x-a", b"b") in wire.sent[0]["headers"] and wire.sent[-1]["more_body"] is False

    asyncio.run(go())


def test_an_early_error_is_the_endpoints_and_a_late_one_ends_the_stream() -> None:
    async def go() -> None:
        wire = Wire()
        with pytest.raises(RequestError):
            await stream(play(RequestError("no")))({}, wire.receive, wire.send)
        assert wire.sent == []
        await stream(play(json_event(1), EngineDeadError("the scheduler died")))({}, wire.receive, wire.send)
        assert b"the scheduler died" in wire.body and wire.sent[-1]["more_body"] is False

    asyncio.run(go())


def test_a_long_prefill_is_kept_alive() -> None:
    async def go() -> None:
        wire, prefill = Wire(), asyncio.Event()
        task = asyncio.ensure_future(
            stream(play(prefill, json_event(1)), keep_alive_s=0.001)({}, wire.receive, wire.send)
        )
        while wire.body.count(b": keep-alive\n\n") < 2:
            await asyncio.sleep(0.001)
        prefill.set()
        await task
        assert wire.sent[0]["status"] == 200 and wire.body.endswith(b"data: 1\n\n")

    asyncio.run(go())


def test_a_client_that_leaves_closes_the_generator() -> None:
    async def go() -> None:
        wire, closed, never = Wire(), asyncio.Event(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                yield json_event(1)
                await never.wait()
            finally:
                closed.set()

        task = asyncio.ensure_future(stream(events())({}, wire.receive, wire.send))
        await wire.begun()
        wire.gone.set()
        with pytest.raises(ClientDisconnect):
            await task
        assert closed.is_set()

    asyncio.run(go())


def scope(path: str) -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}


class Caller(Wire):
    """A wire that sends a body first."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._body: bytes | None = body

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await super().receive()


@pytest.mark.parametrize("streams", [b"true", b"false"])
def test_a_request_whose_client_leaves_is_aborted(streams: bytes) -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: None)
        context = engine.context()
        caller = Caller(b'{"text": "a", "stream": %b}' % streams)
        app = App(all_endpoints(context), context.settings.server)
        task = asyncio.ensure_future(app(scope("/generate"), caller.receive, caller.send))
        while not engine.requests:
            await asyncio.sleep(0)
        caller.gone.set()
        await task
        assert engine.sent[-1] == Abort(engine.requests[0].handle) and caller.sent == []

    asyncio.run(go())


def test_a_slow_client_gets_its_tokens_in_one_piece_and_holds_up_nobody() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: [*b"abcdefgh"])
        context = engine.context()
        app = App(all_endpoints(context), context.settings.server)
        slow, quick = Caller(b'{"text": "a", "stream": true}'), Caller(b'{"text": "a", "stream": true}')
        slow.blocked.clear()
        tasks = [asyncio.ensure_future(app(scope("/generate"), c.receive, c.send)) for c in (slow, quick)]
        await tasks[1]
        assert quick.body.count(b"data: {") == 8 and not slow.sent
        slow.blocked.set()
        await tasks[0]
        assert slow.body.count(b"data: {") == 2 and slow.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(go())
