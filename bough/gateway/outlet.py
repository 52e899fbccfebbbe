"""The client's side of a call: sends and counts the response, and ends a broken stream with an error.

A partial line is kept back until it is whole: it would spoil an error event after it.
"""

import time
from collections import deque
from collections.abc import Awaitable

from starlette.types import Message, Send

from bough.gateway.call import Call
from bough.gateway.responses import Response
from bough.server.endpoint import encode_json
from bough.server.errors import Failure, shape_of
from bough.server.http_protocol import WHOLE_KEY, Exchange

TAIL = 4096  # bytes of a stream that are remembered: its last event, with the usage
RECENT = 64  # pieces that are kept for it, because joining them as they come would cost more than sending
LONGEST_LINE = 1 << 16  # a longer one goes out in parts
NEWLINE = ord("\n")


class Outlet:
    """A response begins and ends by `send`; pieces of a stream take a short way to the client's connection."""

    _recent: deque[bytes]  # what came last of a stream
    _of_lines = False
    half_line = b""
    secret: bytes | None = None  # the worker's key, which no client sees
    ended = False

    def __init__(self, call: Call, send: Send, exchange: Exchange) -> None:
        self._call, self._send = call, send
        self.exchange, self._write = exchange, exchange.write

    @property
    def tail(self) -> bytes:
        return b"".join(self._recent)[-TAIL:]

    def whole(self, answer: Response) -> Awaitable[None]:
        self._begin(answer.status)
        self.ended = True
        self._call.sent_bytes += len(answer.body)
        return self._send(whole_message(answer))

    def start(self, headers: list[tuple[bytes, bytes]], *, of_lines: bool) -> Awaitable[None]:
        self._begin(200)
        self._recent = deque(maxlen=RECENT)
        self._of_lines = of_lines
        return self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def write(self, data: bytes) -> None:
        """Sends a piece of the stream; unless the client keeps up, it must do so before the next."""
        self._recent.append(data[-TAIL:])
        if self.half_line:  # before the key is looked for, which may have come in two pieces
            self.half_line, data = b"", self.half_line + data
        if self.secret is not None:
            data = data.replace(self.secret, b"***")
        if data[-1] != NEWLINE:
            data = self._whole_lines(data)
        self._call.sent_bytes += len(data)
        self._write(data)

    def passed(self, last: bytes, sent: int) -> None:
        """Whole lines went by, of which these came last."""
        self._recent.append(last[-TAIL:])
        self._call.sent_bytes += sent

    async def end(self) -> None:
        self._pass(self.half_line)
        await self.exchange.until_writable()
        self.ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def broken(self, message: str) -> None:
        """Ends a broken stream with an error in its protocol's shape."""
        self._call.error = message
        error = encode_json(shape_of(self._call.path)(Failure(502, message, "WorkerLostError")))
        sent, self.half_line = self.tail.removesuffix(self.half_line), b""
        if self._of_lines:
            gap = b"" if sent.endswith(b"\n") or not sent else b"\n"
            self._pass(gap + error + b"\n")
        else:
            gap = b"" if sent.endswith((b"\n\n", b"\r\n\r\n")) or not sent else b"\n\n"
            name = b"event: error\n" if self._call.path == "/v1/messages" else b""
            self._pass(gap + name + b"data: " + error + b"\n\n")
        self.ended = True
        self.exchange.write(b"", more=False)  # at once: the client may be one that takes nothing

    def _whole_lines(self, data: bytes) -> bytes:
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > LONGEST_LINE:
            end = len(data) - len(self.secret or b"")  # which may have come in part
        self.half_line = data[end:]
        return data[:end]

    def _pass(self, data: bytes) -> None:
        self._call.sent_bytes += len(data)
        self.exchange.write(data)

    def _begin(self, status: int) -> None:
        self._call.status = status
        self._call.first_byte_s = time.perf_counter() - self._call.began_s


def whole_message(answer: Response) -> Message:
    start = "http.response.start"
    return {"type": start, "status": answer.status, "headers": answer.headers, WHOLE_KEY: answer.body}
