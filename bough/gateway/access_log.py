"""The access log: one line of JSON per request on standard error. Nothing in it says what a request was about."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from bough.gateway.call import Call
from bough.server.endpoint import encode_json


class AccessLog:
    """Writes the lines, if they are wanted."""

    def __init__(self, enabled: bool, out: TextIO | None = None) -> None:
        self._out = (out or sys.stderr) if enabled else None

    def write(self, call: Call) -> None:
        if self._out is None:
            return
        line = {
            "time": round(time.time(), 3),
            "request_id": call.request_id,
            "method": call.method,
            "path": call.path,
            "status": call.status,
            "model": call.peek.model,
            "worker": None if call.worker is None else call.worker.url,
            "client": call.client_name,
            "attempts": call.attempts,
            "retries": call.retries,
            "moves": call.moves,
            "failovers": call.failovers,
            "hedges": call.hedges,
            "queued_ms": _ms(call.queued_s),
            "first_byte_ms": None if call.first_byte_s is None else _ms(call.first_byte_s),
            "duration_ms": _ms(time.perf_counter() - call.began_s),
            "bytes": call.sent_bytes,
            "expected_cached": round(call.expected_cached, 3),
            "error": call.error,
        }
        self._out.write(encode_json(line).decode() + "\n")
        self._out.flush()


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
