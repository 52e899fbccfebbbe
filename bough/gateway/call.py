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
SHOWN = ("peek.model", "worker", "client_name", "queued_s", "first_byte_s", "sent_bytes", "expected_cached", "reason")
_shown = operator.attrgetter(*SHOWN, *LOGGED)
KEPT = 100  # lines, for the page


class AccessLog:
    """One line of JSON per request on standard error, without any content of the request. The last ones are kept."""

    def __init__(self, enabled: bool, out: TextIO | None = None) -> None:
        self._out = (out or sys.stderr) if enabled else None
        self._recent: deque[tuple[Any, ...]] = deque(maxlen=KEPT)

    def write(self, call: Call, took_s: float) -> None:
        self._recent.append((time.time(), took_s, _shown(call)))
        if self._out is not None:
            self._out.write(encode_json(_line(*self._recent[-1])).decode() + "\n")
            self._out.flush()

    def recent(self) -> list[dict[str, Any]]:
        return [_line(*entry) for entry in self._recent]


def _line(ended_s: float, took_s: float, shown: tuple[Any, ...]) -> dict[str, Any]:
    model, worker, client, queued_s, first_byte_s, sent_bytes, expected_cached, reason, *logged = shown
    line = {
        "time": ended_s,
        **dict(zip(LOGGED, logged, strict=True)),
        "model": model,
        "worker": None if worker is None else worker.url,
        "client": client,
        "queued_ms": 1000 * queued_s,
        "first_byte_ms": None if first_byte_s is None else 1000 * first_byte_s,
        "duration_ms": 1000 * took_s,
        "bytes": sent_bytes,
        "expected_cached": expected_cached,
        "reason": reason,
    }
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in line.items()}
