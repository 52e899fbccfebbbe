"""Pages that another engine reads from memory which this one lends; over the connection they go where there is none.

Memory is lent as long as its array lives, then used again: to write to new memory takes many times as long. A reader
that comes too late, say after its process was stopped for a minute, gets an error and never what it holds by then.
Between engines of one GPU the memory is that GPU's, as far as it has a place for pages on their way.
"""

import contextlib
import logging
import mmap
import os
import secrets
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any, Protocol

import msgspec
import numpy as np

from bough.core.daemon_thread import in_daemon_thread
from bough.core.errors import SettingsError
from bough.disaggregation.wire import Buffer, Loan

log = logging.getLogger(__name__)

LIBRARIES = {"nixl": "Nixl", "mooncake": "Mooncake"}  # each in the module of its name
LATE = "the memory has got another use"
STAMP = 8  # bytes


class Agent(Protocol):
    """Copies memory between processes, on any number of threads."""

    def allocate(self, size: int) -> tuple[Any, bytes]:
        """Memory for as long as this process lives, and where others find it."""

    def read(self, place: bytes, into: Any) -> None:
        """Returns, or raises, once nothing writes there any more."""


class Device(Agent, Protocol):
    """Does so with the memory of GPUs, whose arrays are tensors. A place to read is what `allocate` says, and where the
    pages begin there."""

    gpu: str  # the UUID of that which has the engine's pages
    gpus: tuple[str, ...]  # of all whose memory it can read

    def forget(self) -> None:
        """Closes what it has opened, which would outlive its owner."""


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
        self._agent, self.gpu, self.gpus = agent, "", tuple[str, ...]()
        self.forget: Callable[[], None] = lambda: None  # what it has of other engines' memory
        self._places: dict[int, bytes] = {}  # by address
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)  # by size

    def lend(self, size: int, gpus: Sequence[str] = ()) -> tuple[Buffer, Loan]:
        """`gpus`: those whose memory the reader can read."""
        memory, stamp = self._take(size), secrets.token_bytes(STAMP)
        memory[size : size + STAMP] = np.frombuffer(stamp, dtype=np.uint8)
        return self._lease(memory, size), Loan(self._places[memory.ctypes.data], stamp)

    def read(self, loan: Loan, size: int) -> Future[Buffer]:
        return in_daemon_thread(self._fetch, loan, size)

    def _fetch(self, loan: Loan, size: int) -> Buffer:
        memory = self._take(size)
        lease = self._lease(memory, size)
        self._agent.read(loan.place, memory[: size + STAMP])
        if memory[size : size + STAMP].tobytes() != loan.stamp:
            raise OSError(LATE)
        return lease

    def _take(self, size: int) -> Buffer:
        """Of few sizes, so that what was given back fits the next."""
        width = (1 << (size - 1).bit_length()) + STAMP
        with contextlib.suppress(IndexError):
            return self._free[width].pop()
        memory: Buffer
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


class Ring(Remote):
    """Lends parts of one piece of a GPU's memory, which neighbours open once, and reads theirs into others. What has no
    place there goes through the host's. An array of a part is what holds it: slices of that do not."""

    def __init__(self, device: Device, size: int) -> None:
        super().__init__(Shared())
        self.gpu, self.gpus, self.forget = device.gpu, device.gpus, device.forget
        self._device, self._size, self._lock = device, size, threading.Lock()
        self._memory, self._place = device.allocate(size)
        self._used: dict[int, int] = {}  # where parts begin, and end
        self._over: deque[tuple[int, Any]] = deque()  # where they begin, with their stamps: arrays end at any moment

    def lend(self, size: int, gpus: Sequence[str] = ()) -> tuple[Any, Loan]:
        at = self._claim(size) if self.gpu in gpus else None
        if at is None:
            return super().lend(size)
        stamp, loan = super().lend(1)
        place = msgspec.msgpack.encode((self._place, at))
        return self._part(at, size, stamp), msgspec.structs.replace(loan, on_gpu=place)

    def _fetch(self, loan: Loan, size: int) -> Any:
        if not loan.on_gpu:
            return super()._fetch(loan, size)
        at = self._claim(size)
        into = np.empty(size, dtype=np.uint8) if at is None else self._part(at, size)
        self._device.read(loan.on_gpu, into)
        super()._fetch(loan, 1)  # raises unless the memory is still lent
        return into

    def _claim(self, size: int) -> int | None:
        """Where the first gap of that size begins."""
        with self._lock:
            while self._over:
                begin, stamp = self._over.popleft()
                del stamp, self._used[begin]
            gaps = zip([0, *sorted(self._used.values())], [*sorted(self._used), self._size], strict=True)
            at = next((begin for begin, end in gaps if end - begin >= size), None)
            if at is not None:
                self._used[at] = at + size
            return at

    def _part(self, at: int, size: int, stamp: Buffer | None = None) -> Any:
        part = self._memory[at : at + size]
        weakref.finalize(part, self._over.append, (at, stamp))
        return part


def open_transport(backend: str, device: Device | None = None, size: int = 0) -> Remote:
    """With a device, and so many bytes of its memory, pages may stay there."""
    try:
        if device is not None:
            return Ring(device, size)
        if backend in LIBRARIES:
            return Remote(getattr(import_module(f"bough.disaggregation.{backend}"), LIBRARIES[backend])())
    except (ImportError, OSError, RuntimeError) as error:
        if backend != "auto":
            raise SettingsError(f"--disaggregation-transfer-backend {backend} cannot start: {error}.") from None
        log.warning("pages go through the host's memory: %s", error)
    return Remote(Shared())
