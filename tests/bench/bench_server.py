"""A real HTTP server over the scripted engine, in a thread: each request gets as many letters as it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bough.core.finish import FinishReason
from bough.messages.requests import Generate
from bough.server.app import App, Front
from bough.server.http import HttpServer, open_listener, url_of
from bough.server.protocols import all_endpoints
from tests.server.native_engine import NativeEngine

Script = Callable[[Generate], Sequence[int] | FinishReason | None]


def letters(request: Generate) -> Sequence[int]:
    return [ord("x")] * request.sampling.max_new_tokens


class BenchServer:
    """Where it is, and the engine behind it, which remembers what it was sent."""

    def __init__(self, url: str, engine: NativeEngine) -> None:
        self.url = url
        self.engine = engine

    @property
    def prompts(self) -> list[str]:
        return [self.engine.prompt_text(request) for request in self.engine.requests]


@contextlib.contextmanager
def bench_server(script: Script = letters, **settings: Any) -> Iterator[BenchServer]:
    ready = threading.Event()
    parts: list[Any] = []

    async def serve() -> None:
        engine = NativeEngine(script)
        context = engine.context(port=0, **settings)
        server = context.settings.server
        listener = open_listener(server)
        front = Front()
        front.open(App(all_endpoints(context), server))
        http = HttpServer(front, listener, server)
        parts.extend([BenchServer(url_of(listener, server), engine), http])
        ready.set()
        await http.run_here()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield parts[0]
    finally:
        parts[1].should_exit = True
        thread.join(30)
