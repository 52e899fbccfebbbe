"""The short way of a stream: nearly every read from a worker is one chunk with one event of tokens, which goes on to
the client in one step, past both parsers of HTTP. Everything else takes the long way, by `UpstreamResponse.feed`.
"""

import asyncio
import re
from collections.abc import Callable

from bough.gateway.outlet import Outlet
from bough.gateway.responses import OpenStream, secret_of
from bough.gateway.resume import ResumableText

# One chunk with one event: of a worker that says its tokens (see `resume`), and of any other.
OWN = re.compile(rb"[^\r]+\r\n: ids ([\d,]+)\n((?:data: \{|event: content.*\ndata: \{).*\n\n)\r\n").fullmatch
FOREIGN = re.compile(rb"[^\r]+\r\n((?:data: \{|event: .*\ndata: \{).*\n\n)\r\n").fullmatch
LONGEST = 2048
# How a chunk begins, by its length with its size and the ends of lines.
HEADS = {len(head) + size + 2: head for size in range(1, LONGEST) for head in (b"%x\r\n" % size,)}


class Relay(asyncio.Protocol):
    """The protocol of a worker's connection while its stream is copied. It reads few objects for each event: what it
    costs is mostly the memory that it touches."""

    __slots__ = (
        *("_add", "_before", "_client", "_feed", "_last", "_lease", "_outlet"),
        *("_push", "_secret", "_sent", "_text", "_transport", "_whole"),
    )

    def __init__(self, stream: OpenStream, text: ResumableText, outlet: Outlet) -> None:
        self._lease, self._text, self._outlet = stream.lease, text, outlet
        self._client, self._push, self._add = outlet.exchange.connection, outlet.exchange.transport.write, text.add_ids
        self._feed, self._transport = stream.response.feed, stream.response.transport
        self._whole: Callable[[bytes], re.Match[bytes] | None] | None = None
        self._last, self._sent = b"", 0  # of the short way, what came last and how much
        self._before = self._transport.get_protocol()
        key = stream.lease.worker.api_key
        self._secret = None if key is None else secret_of(key)
        if outlet.exchange.chunked:  # then the frame of a chunk is the same on both sides
            self._transport.set_protocol(self)

    def end(self) -> None:
        self._settle()
        self._transport.set_protocol(self._before)

    def data_received(self, data: bytes) -> None:
        whole = self._whole  # None while the long way holds something back
        if whole is not None and self._client.takes_more and data.startswith(HEADS.get(len(data), b"?")):
            found = whole(data)
            if found is not None and (self._secret is None or self._secret not in data):
                if whole is OWN:
                    ids, event = found.groups()
                    self._push(b"%x\r\n%b\r\n" % (len(event), event))
                    self._add(ids)
                else:
                    event = found[1]
                    self._push(data)
                self._lease.heard = True
                self._last = event
                self._sent += len(event)
                return
        self._settle()
        ready, text = self._feed(data), self._text
        ready = ready and text.steady and not self._outlet.half_line
        self._whole = (OWN if text.annotated else FOREIGN) if ready else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._before.connection_lost(exc)

    def _settle(self) -> None:
        """Those that count know of the short way before the long one goes on."""
        if self._sent:
            self._outlet.passed(self._last, self._sent)
            self._text.last, self._sent = self._last, 0
