"""LMCache's server (`lmcache_server HOST PORT`) as a store, by its own protocol: its package is not needed here.

It removes nothing. So each engine bounds what it puts there, and a run that must go is overwritten with nothing, which
another engine takes for a run until it reads it.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from bough.storage.store import TIMEOUT_S, Buffer

QUESTION, ANSWER = struct.Struct("<9i150s"), struct.Struct("<9i")  # a command or its outcome, bytes, a tensor's form
PUT, GET, EXIST, DONE = 1, 2, 3, 200
BYTES = 1, 6, 0  # the form: any order of dimensions, uint8, at no particular place
MOST_BYTES = 2**31 - 1  # that its numbers can say


class LMCache:
    errors = (OSError,)

    def __init__(self, url: str = "lm://127.0.0.1:65432", max_bytes: int = 8 << 30) -> None:
        place = urlsplit(url)
        if place.scheme != "lm" or not place.hostname or not place.port:
            raise ValueError(f"url looks like lm://host:port, got {url!r}")
        self._place, self._room, self.max_bytes = (place.hostname, place.port), max_bytes, min(max_bytes, MOST_BYTES)
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._empty: set[str] = set()  # names of runs that were overwritten
        try:
            self.exists("0" * 64)
        except OSError as error:
            advice = "start it with `lmcache_server HOST PORT`, or use redis, memory or file"
            raise ConnectionError(f"no LMCache server answers at {url} ({error}); {advice}") from None

    def exists(self, key: str) -> bool:
        return key not in self._empty and self._ask(EXIST, key) is not None

    def write(self, key: str, header: bytes, run: Buffer) -> bool:
        if (size := len(header) + run.nbytes) > self._room:
            return False
        self._room -= size
        self._empty.discard(key)
        return self._ask(EXIST, key, put=(header, run.data)) is not None

    def read(self, key: str, header: bytearray, run: Buffer) -> bool:
        size = self._ask(GET, key, into=(header, run.data))
        if size == 0:
            self._empty.add(key)
        return bool(size)

    def remove(self, key: str) -> None:
        if self.exists(key):
            self._ask(EXIST, key, put=(b"",))
            self._empty.add(key)

    def clear(self) -> None:
        raise OSError("LMCache's server cannot be told to forget; restart it")

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _ask(self, command: int, key: str, put: Sequence[Any] = (), into: Sequence[Any] = ()) -> int | None:
        """How many bytes it has there, if anything; behind a `put`, which has no answer of its own."""
        with self._lock:
            try:
                self._link = link = self._link or socket.create_connection(self._place, TIMEOUT_S)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                before = [_question(PUT, key, sum(map(len, put))), *put] if put else []
                for part in (*before, _question(command, key)):
                    link.sendall(part)
                _fill(link, answer := bytearray(ANSWER.size))
                outcome, size, *_ = ANSWER.unpack(answer)
                if outcome == DONE and size == sum(map(len, into)):
                    with contextlib.suppress(ConnectionError):
                        for part in into:
                            _fill(link, part)
                        return int(size)
                if size:  # more than is wanted; or of a run whose writer has died it has nothing, and hangs up
                    self.close()
                return int(size) if outcome == DONE else None
            except BaseException:
                self.close()  # what is still to come would be taken for the next answer
                raise


def _question(command: int, key: str, size: int = 0) -> bytes:
    name = f"bough@1@0@{key}@uint8"  # which it reads as model, ranks, rank, hash and dtype
    return QUESTION.pack(command, size, *BYTES, size, 0, 0, 0, name.encode().ljust(150))


def _fill(link: socket.socket, buffer: Any) -> None:
    rest = memoryview(buffer)
    while rest:
        count = link.recv_into(rest)
        if not count:
            raise ConnectionResetError("LMCache's server has hung up")
        rest = rest[count:]
