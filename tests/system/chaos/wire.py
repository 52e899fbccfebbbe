"""The connection between the gateway and one engine, as a proxy that can fall silent or garble what the engine says."""

from __future__ import annotations

import asyncio
import contextlib
import random

PIECE = 65536
CONNECT_S = 5.0


class Wire:
    """`mode` is `pass`, `silent` (takes everything, hands on nothing) or `corrupt`."""

    def __init__(self, host: str, port: int) -> None:
        self.mode = "pass"
        self.url = ""
        self.corrupted = 0
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()
        self._random = random.Random(7)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def set(self, mode: str) -> None:
        self.mode = mode
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.wait_for(asyncio.open_connection(*self._target), CONNECT_S)
            ways = [
                asyncio.create_task(self._carry(reader, far_writer, False)),
                asyncio.create_task(self._carry(far_reader, writer, True)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the engine is down, or the script ends: the gateway sees the connection close
        finally:
            for end in (writer, far_writer):
                if end is not None:
                    end.close()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(PIECE):
                while self.mode == "silent":
                    await self._changed.wait()
                if is_reply and self.mode == "corrupt":
                    piece = self._corrupt(piece)
                target.write(piece)
                await target.drain()

    def _corrupt(self, piece: bytes) -> bytes:
        """Damage that breaks the framing. Changed letters inside an answer would be nobody's to find: TCP's and TLS's
        checksums are there for those."""
        self.corrupted += 1
        noise = self._random.randbytes(self._random.randrange(1, 200))
        if piece.startswith(b"HTTP/1.1 "):
            broken = [noise, b"HTTP/1.1 2" + noise, piece.replace(b"HTTP/1.1 ", b"HTTP/9.9 ", 1)]
            return self._random.choice(broken)
        return self._random.choice([b"zz\r\n" + noise, b"-5\r\n" + piece, b"\xff\xff\r\n\r\n"])
