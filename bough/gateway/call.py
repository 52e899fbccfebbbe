"""One client request on its way through the gateway, and its access log line."""

from __future__ import annotations

import asyncio
import operator
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from bough.gateway.peek import Peek
from bough.gateway.poison import Faults
from bough.gateway.worker import Worker
from bough.server.endpoint import encode_json

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class Call(msgspec.Struct, eq=False):
    """The request, and how it went, for the log and the metrics."""

    method: str
    path: str  # without the query
    target: bytes  # with it, as the client wrote it
    headers: Sequence[tuple[bytes, bytes]]  # those that workers get
    body: bytes
    peek: Peek
    request_id: str
    client_name: str | None = None  # whose key it came with
    tenant: bool = False  # it came with a client's key, which shows no settings of workers
    pinned: Worker | None = None  # the only worker that can answer
    began_s: float = msgspec.field(default_factory=time.perf_counter)
    admitted: bool = False  # it counts against the gateway's limit on requests at once
    tried: frozenset[str] = frozenset()  # workers that failed it
    tried_prefills: frozenset[str] = frozenset()  # prefill engines that failed it
    unable: frozenset[str] = frozenset()  # workers that cannot go on with its stream
    faults: Faults = msgspec.field(default_factory=Faults)
    worker: Worker | None = None  # the last one it was sent to
    attempts: int = 0
    retries: int = 0
    moves: int = 0
    failovers: int = 0
    hedges: int = 0
    status: int = 0
    first_byte_s: float | None = None
    sent_bytes: int = 0
    queued_s: float = 0.0
    expected_cached: float = 0.0
    reason: str = ""  # why the worker was chosen
    error: str | None = None
    task: asyncio.Task[None] | None = None  # that answers it
    span: Span | None = None  # of the trace that it is part of


LOGGED = ("request_id", "method", "path", "status", "attempts", "retries", "moves", "failovers", "hedges", "error")
OTHERS = {"model": "peek.model", "worker": "worker", "client": "client_name", "bytes": "sent_bytes"}
OTHERS |= {"expected_cached": "expected_cached", "reason": "reason"}
TIMES = {"queued_ms": "queued_s", "first_byte_ms": "first_byte_s"}
NAMES = (*LOGGED, *OTHERS, *TIMES)
_logged = operator.attrgetter(*LOGGED, *OTHERS.values(), *TIMES.values())
KEPT = 100  # lines, for the page


class AccessLog:
    """One line of JSON per request on standard error, without any content of the request. The last ones are kept."""

    def __init__(self, enabled: bool, out: TextIO | None = None) -> None:
        self._out = (out or sys.stderr) if enabled else None
        self._recent: deque[tuple[Any, ...]] = deque(maxlen=KEPT)

    def write(self, call: Call, took_s: float) -> None:
        self._recent.append((time.time(), took_s, _logged(call)))
        if self._out is not None:
            self._out.write(encode_json(_line(*self._recent[-1])).decode() + "\n")
            self._out.flush()

    def recent(self) -> list[dict[str, Any]]:
        return [_line(*entry) for entry in self._recent]


def _line(ended_s: float, took_s: float, logged: tuple[Any, ...]) -> dict[str, Any]:
    line = {"time": ended_s, **dict(zip(NAMES, logged, strict=True)), "duration_ms": took_s}
    line["worker"] = None if line["worker"] is None else line["worker"].url
    for name in (*TIMES, "duration_ms"):
        line[name] = None if line[name] is None else 1000 * line[name]
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in line.items()}
