"""One request of a client on its way through the gateway, and what is to be remembered of it when it has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bough.gateway.peek import Peek
from bough.gateway.worker import Worker

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(slots=True, eq=False)
class Call:
    """What came, never changed; and how it went, for the log and the metrics."""

    method: str
    path: str  # without the query
    target: str  # with it, as the client wrote it
    headers: Sequence[tuple[bytes, bytes]]  # those that workers get
    body: bytes
    peek: Peek
    request_id: str
    client_name: str | None = None  # whose key it came with
    pinned: Worker | None = None  # the only worker that can answer
    began_s: float = field(default_factory=time.perf_counter)
    admitted: bool = False  # it counts against the gateway's limit on requests at once
    tried: set[str] = field(default_factory=set)  # workers that failed it
    unable: set[str] = field(default_factory=set)  # workers that cannot go on with its stream
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
    error: str | None = None
    span: Span | None = None  # of the trace that it is part of
