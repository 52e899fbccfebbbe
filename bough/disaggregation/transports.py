"""Pages that another engine reads from memory which this one lends; over the connection they go where there is none.

Memory is lent as long as its array lives, then used again: to write to new memory takes many times as long. A reader
that comes too late, say after its process was stopped for a minute, gets an error and never what it holds by then.
"""

import contextlib
import mmap
import os
import secrets
import threading
import weakref
from collections import defaultdict
from concurrent.futures import Future
from importlib import import_module
from typing import Protocol

import msgspec
import numpy as np

from bough.core.errors import SettingsError
from bough.disaggregation.wire import Buffer

LIBRARIES = {"nixl": "Nixl", "mooncake": "Mooncake"}  # each in the module of its name
LATE = "the memory has got another use"
STAMP = 8  # bytes


class Agent(Protocol):
    """Copies memory between processes, on any number of threads."""

    def allocate(self, size: int) -> tuple[Buffer, bytes]:
        """Memory for as long as this process lives, and where others find it."""

    def read(self, place: bytes, into: Buffer) -> None:
        """Returns, or raises, once nothing writes there any more."""


class Shared:
    """Memory without a name in any file system, so a process that dies leaves none behind."""

    def allocate(self, size: int) -> tuple[Buffer, bytes]:
        fd = os.memfd_create("bough")
        os.ftruncate(fd, size)
        return np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8), msgspec.msgpack.encode((os.getpid(), fd))

    def read(self, place: bytes, into: Buffer) -> None:
        pid, fd = msgspec.msgpack.decode(place, type=tuple[int, int])
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), into.size), dtype=np.uint8)
        for piece in (slice(-STAMP), slice(-STAMP, None)):  # the stamp last: what it vouches for has been read
            into[piece] = content[piece]


class Remote:
    """Through an agent. Its memory is used again: to make some takes time, and a late read must find it mapped.
    Behind the pages stands a stamp, which goes before they do."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._places: dict[int, bytes] = {}  # by address
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)  # by size

    def lend(self, size: int) -> tuple[Buffer, bytes]:
        memory, stamp = self._take(size), secrets.token_bytes(STAMP)
        memory[size : size + STAMP] = np.frombuffer(stamp, dtype=np.uint8)
        return self._lease(memory, size), msgspec.msgpack.encode((self._places[memory.ctypes.data], stamp))

    def read(self, place: bytes, size: int) -> Future[Buffer]:
        found: Future[Buffer] = Future()
        threading.Thread(target=self._read, args=(found, place, size), name="transfer", daemon=True).start()
        return found

    def _read(self, found: Future[Buffer], place: bytes, size: int) -> None:
        try:
            where, stamp = msgspec.msgpack.decode(place, type=tuple[bytes, bytes])
            memory = self._take(size)
            lease = self._lease(memory, size)
            self._agent.read(where, memory[: size + STAMP])
            if memory[size : size + STAMP].tobytes() != stamp:
                raise OSError(LATE)
            found.set_result(lease)
        except Exception as error:  # noqa: BLE001  (the reader gets it; each library has its own)
            found.set_exception(error)

    def _take(self, size: int) -> Buffer:
        """Of few sizes, so that what was given back fits the next."""
        width = (1 << (size - 1).bit_length()) + STAMP
        with contextlib.suppress(IndexError):
            return self._free[width].pop()
        memory, place = self._agent.allocate(width)
        self._places[memory.ctypes.data] = place
        return memory

    def _lease(self, memory: Buffer, size: int) -> Buffer:
        array: Buffer = np.frombuffer(memory.data[:size], dtype=np.uint8)
        weakref.finalize(array, self._give_back, memory, size)
        return array

    def _give_back(self, memory: Buffer, size: int) -> None:
        memory[size : size + STAMP] = 0
        self._free[memory.size].append(memory)


def open_transport(backend: str) -> Remote:
    if backend not in LIBRARIES:
        return Remote(Shared())
    try:
        return Remote(getattr(import_module(f"bough.disaggregation.{backend}"), LIBRARIES[backend])())
    except (ImportError, OSError, RuntimeError) as error:
        raise SettingsError(f"--disaggregation-transfer-backend {backend} cannot start: {error}.") from None
