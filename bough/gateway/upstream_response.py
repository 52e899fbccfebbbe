"""One response of a worker as its bytes arrive, parsed by httptools (in C). A slow reader slows the worker down."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future, Transport
from collections.abc import Callable

import httptools

READ_BUFFER = 1 << 18  # bytes that wait for their reader before the worker is slowed down
LARGEST_HEAD = 1 << 16
NO_BODY = (204, 304)


class ProtocolError(ConnectionError):
    """What came is no HTTP response."""


class UpstreamResponse:
    """Fed by its connection; the parser calls the `on_` methods."""

    status = 0  # until the headers are here
    begun = False  # a byte has come
    complete = False
    reusable = False  # the connection can take another request once this is complete
    ends_with_connection = False  # nothing else marks the end of the body
    # Takes what comes while the reader waits, which then need not wake up; returns False to leave it to the reader.
    tap: Callable[[bytes], bool] | None = None
    _at_chunk = False  # of the body, the next byte but for the rest of a line begins a chunk
    _parser: httptools.HttpResponseParser | None
    _head_bytes = 0
    _interim = False
    _end = 0  # how many pieces are there when it is complete
    _waiting_bytes = 0
    _paused = _closed = False
    _error: Exception | None = None
    _reader: Future[None] | None = None

    def __init__(
        self, transport: Transport, loop: AbstractEventLoop, to_head: bool, on_close: Callable[[UpstreamResponse], None]
    ) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.transport, self._loop = transport, loop
        self._to_head = to_head  # the request's method was HEAD: no body, whatever the headers say
        self._on_close = on_close
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # the parser calls it, in C
        self._parser = httptools.HttpResponseParser(self)

    # ---- for its reader

    @property
    def content_type(self) -> bytes:
        return self.named.get(b"content-type", b"").partition(b";")[0].strip().lower()

    async def read_some(self) -> bytes:
        """The body's next bytes, empty at its end. Raises a `ConnectionError` if it ends too early."""
        while not self._pieces:
            if self.complete and self._error is None:
                return b""
            await self.more()
        if self._paused:
            self._go_on()
        return self._taken()

    def _taken(self) -> bytes:
        pieces, self._waiting_bytes = self._pieces, 0
        if self.complete:
            del pieces[self._end :]  # of another response
        taken = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return taken

    def whole(self) -> bytes | None:
        """The body, if all of it is here: as nearly always, when its headers are."""
        return self._taken() if self.complete and self._error is None else None

    async def read(self) -> bytes:
        pieces = []
        while piece := await self.read_some():
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Returns a finished connection to the pool; closes any other, so that the worker aborts the request."""
        if not self._closed:
            self._closed = True
            self._parser = None  # it holds this response: without a circle, both go without the garbage collector
            if self._paused:
                self._go_on()
            self._on_close(self)

    def _go_on(self) -> None:
        self._paused = False
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def more(self) -> Future[None]:
        """Is done when something has come."""
        if self._error is not None:
            raise self._error
        self._reader = self._loop.create_future()
        return self._reader

    # ---- for its connection

    def feed(self, data: bytes) -> bool:
        """Whether nothing is left of it, here or in the parser, and the next byte begins a chunk."""
        parser, reader = self._parser, self._reader
        if self.complete or parser is None or self._error is not None:
            self.reusable = False  # nobody has asked for more
            return False
        if not self.status:
            self.begun, self._head_bytes = True, self._head_bytes + len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ProtocolError(f"an answer that cannot be read ({error.__context__ or error})"))
        if not self.status and self._head_bytes > LARGEST_HEAD:
            self._fail(ProtocolError("an answer whose headers are too long"))
        if self._pieces:
            if self.tap is not None and reader is not None and not reader.done():
                piece = self._taken() if self.complete or len(self._pieces) > 1 else self._pieces.pop()
                try:
                    if piece and not self.tap(piece):
                        self._pieces.append(piece)
                        self._end = 1
                except Exception as error:  # noqa: BLE001  (not swallowed: the reader gets it)
                    self._error = error
                if not (self._pieces or self.complete or self._error is not None):
                    return self._at_chunk and data.endswith(b"\r\n")
            self._waiting_bytes += len(data)
            if self._waiting_bytes > READ_BUFFER and not self._paused and not self.transport.is_closing():
                self._paused = True
                self.transport.pause_reading()
        if reader is not None and not reader.done():
            reader.set_result(None)
        return False

    def lost(self, error: Exception | None) -> None:
        if error is None and self.status and self.ends_with_connection and self._error is None:
            self.complete, self._end = True, len(self._pieces)
        else:
            self._fail(ConnectionError(str(error) if error is not None else "the connection was closed"))
        self.reusable = False
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _fail(self, error: ConnectionError) -> None:
        self.reusable = False
        if not self.complete and self._error is None:
            self._error = error

    # ---- for the parser

    def on_message_begin(self) -> None:
        if self.complete:
            self.reusable = False  # another response than the one that was asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else a trailer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.status or self._parser is None:
            return
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            raise ProtocolError(f"the status {status}")
        if status < 200:  # the real one follows
            self._interim = True
            self.headers.clear()
            return
        self.status = status
        self.named = named = dict(reversed(self.headers))  # the first of each name
        if self._to_head:
            self.complete = True
        elif b"content-length" not in named and status not in NO_BODY:
            codings = dict(self.headers).get(b"transfer-encoding", b"")  # the last one counts
            self.ends_with_connection = not codings.lower().endswith(b"chunked")

    def on_chunk_header(self) -> None:
        self._at_chunk = False

    def on_chunk_complete(self) -> None:
        self._at_chunk = True

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif not self.complete and self._parser is not None:
            self.complete, self.reusable = True, self._parser.should_keep_alive()
            self._end = len(self._pieces)


class EventReader:
    """Splits a byte stream into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of complete events, without the end mark."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        return [each for each in found if each != b"[DONE]"]
