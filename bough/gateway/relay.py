"""The short way of a stream: nearly every read from a worker is one chunk with one event of tokens, which goes on to
the client in one step, past both parsers of HTTP. Everything else takes the long way, by `UpstreamResponse.feed`.
"""

import asyncio
import re

from bough.gateway.outlet import Outlet
from bough.gateway.responses import OpenStream
from bough.gateway.resume import ResumableText

# One chunk with one event of a worker that says its tokens (see `resume`).
OWN = re.compile(rb"[^\r]+\r\n: ids ([\d,]+)\n((?:data: \{|event: content.*\ndata: \{).*\n\n)\r\n").fullmatch
# How any other worker's ends that can be the last with something to learn; what is in it does not matter.
END = b"}\n\n\r\n"
LONGEST = 2048
# How a chunk begins, by its length with its size and the ends of lines.
HEADS = {len(head) + size + 2: head for size in range(1, LONGEST) for head in (b"%x\r\n" % size,)}


class Relay(asyncio.Protocol):
    """The protocol of a worker's connection while its stream is copied. It reads few objects for each event: what it
    costs is mostly the memory that it touches."""

    __slots__ = (
        *("_add", "_before", "_client", "_feed", "_last", "_lease", "_outlet", "_own"),
        *("_push", "_ready", "_secret", "_sent", "_text", "_transport"),
    )

    def __init__(self, stream: OpenStream, text: ResumableText, outlet: Outlet) -> None:
        self._lease, self._text, self._outlet, self._secret = stream.lease, text, outlet, outlet.secret
        self._client, self._push, self._add = outlet.exchange.connection, outlet.exchange.transport.write, text.add_ids
        self._feed, self._transport = stream.response.feed, stream.response.transport
        self._ready = self._own = False  # whether the long way holds nothing back, and the worker says its tokens
        self._last, self._sent = b"", 0  # of the short way, what came last and how much
        self._before = self._transport.get_protocol()
        if outlet.exchange.chunked:  # then the frame of a chunk is the same on both sides
            self._transport.set_protocol(self)

    def end(self) -> None:
        self._settle()
        self._transport.set_protocol(self._before)

    def data_received(self, data: bytes) -> None:
        head = HEADS.get(len(data), b"?")
        if self._ready and self._client.takes_more and data.startswith(head):
            found = OWN(data) if self._own else None
            if (found or (not self._own and data.endswith(END))) and (self._secret is None or self._secret not in data):
                if found:
                    ids, event = found.groups()
                    self._push(b"%x\r\n%b\r\n" % (len(event), event))
                    self._add(ids)
                else:
                    event = data[len(head) : -2]
                    self._push(data)
                self._lease.heard = True
                self._last = event
                self._sent += len(event)
                return
        self._settle()
        ready, text = self._feed(data), self._text
        self._ready, self._own = ready and text.steady and not self._outlet.half_line, bool(text.annotated)

    def connection_lost(self, exc: Exception | None) -> None:
        self._before.connection_lost(exc)

    def _settle(self) -> None:
        """Those that count know of the short way before the long one goes on."""
        if self._sent:
            self._outlet.passed(self._last, self._sent)
            self._text.last, self._sent = self._last, 0
