"""The scripted engine with answers to commands, and a server over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from bough.core.control import ReadWeight, RecordExperts
from bough.core.finish import FinishAbort, FinishReason
from bough.messages.outputs import Delta, Reply
from bough.messages.requests import (
    Abort,
    ChangeAdapters,
    ChangeSession,
    ChangeSettings,
    ChangeStorage,
    Control,
    FlushCache,
    Generate,
    GetState,
    GetTimeline,
    GetTree,
    Pause,
    Ping,
    ProcessCommand,
    Resume,
    StartProfile,
    StopProfile,
)
from bough.server.app import App, Front, with_cors, with_count
from bough.server.browsers import BrowserRules
from bough.server.protocols import all_endpoints
from bough.server.tracing import RequestLogging
from tests.fakes.scripted_engine import ScriptedEngine

Play = Sequence[int] | FinishReason | None
STATE = {
    "num_running_reqs": 2,
    "num_waiting_reqs": 1,
    "num_used_tokens": 50,
    "max_total_num_tokens": 100,
    "last_gen_throughput": 9.5,
    "prompt_tokens": 8,
    "cached_tokens": 2,
    "new_token_ratio": 0.5,
    "num_retracted_reqs": 1,
    "num_grammar_queue_reqs": 0,
    "num_retractions": 3,
    "kv_read_bytes": 4096,
    "kv_shared_bytes": 1024,
    "spec_verify_ct": 4,
    "spec_num_proposed_drafts": 8,
    "spec_num_correct_drafts": 2,
    "num_evicted_tokens": 7,
    "transfers": 5,
    "transferred_bytes": 640,
    "failed_transfers": 1,
}


class NativeEngine(ScriptedEngine):
    """`busy` flushes are refused before one succeeds; commands that came are in `commands`."""

    def __init__(self, script: Callable[[Generate], Play]) -> None:
        super().__init__(script)
        self.busy = 0
        self.silent = False  # stuck: no command is answered
        self.commands: list[Any] = []
        self.state = dict(STATE)
        self._open: dict[int, Generate] = {}

    def send(self, *messages: Any) -> None:
        for message in messages:
            match message:
                case Generate():
                    self._open[message.handle] = message
                    super().send(message)
                case Abort(handle=None):
                    named = [m for m in self._open.values() if message.name in (None, m.rid, *m.names)]
                    gone = FinishAbort("aborted", 499, "AbortError")
                    self._later([Delta(m.handle, "", b"", finish=gone) for m in named])
                case Abort():
                    super().send(message)
                case (
                    FlushCache()
                    | ChangeStorage()
                    | GetState()
                    | GetTree()
                    | GetTimeline()
                    | Ping()
                    | ProcessCommand()
                    | ChangeSettings()
                    | Pause()
                    | Resume()
                    | StartProfile()
                    | StopProfile()
                    | Control()
                    | ChangeAdapters()
                    | ChangeSession()
                ):
                    self.commands.append(message)
                    if not self.silent:
                        self._reply(message)

    def _reply(self, message: Any) -> None:
        ok = True
        if isinstance(message, FlushCache | Control):
            ok, self.busy = self.busy <= 0, self.busy - 1
        loop = asyncio.get_running_loop()
        if isinstance(message, ProcessCommand):
            loop.call_soon(self.client.receive, message)
        dumps = isinstance(message, Control) and message.command == RecordExperts("dump")
        shows = isinstance(message, Control) and isinstance(message.command, ReadWeight)
        done = "[[3, 1], [0, 4]]" if dumps else "[[0.5]]" if shows else "done"
        data = {"ids": None} | self.state if isinstance(message, GetTree) else self.state | {"num_paused_requests": 0}
        if isinstance(message, GetTimeline):
            data = {"now": 0.0, "steps": [], "requests": [], "found": None}
        reply = Reply(message.call, ok, done if ok else "busy", data)
        loop.call_soon(self.client.receive, reply)


@asynccontextmanager
async def open_server(engine: NativeEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the whole server, as `bough serve` puts it together."""
    context = engine.context(**settings)
    server = context.settings.server
    browsers = BrowserRules(server, loopback=True)
    logging = RequestLogging(server.log_requests)
    context.client.on_command = logging.obey
    front = Front(logging=logging, root_path=server.root_path, browsers=browsers)
    front.open(with_count(with_cors(App(all_endpoints(context), server), server), context.client.meter))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://localhost") as http:
        yield http
