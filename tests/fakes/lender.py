"""A process that lends memory; of its own, so that it starts fast. And a GPU's memory without a GPU."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import msgspec
import numpy as np

from bough.disaggregation.transports import Remote, Ring, Shared, open_transport

RING_BYTES = 1 << 29


class HostDevice:
    """Memory of the host in the place of a GPU's. As there, what is open stays readable when its owner has ended."""

    gpu, gpus = "GPU-0", ("GPU-0",)

    def __init__(self) -> None:
        self.opened: dict[bytes, np.ndarray] = {}
        self.reads = 0

    def allocate(self, size: int) -> tuple[np.ndarray, bytes]:
        memory, place = Shared().allocate(size)
        return memory, msgspec.msgpack.encode((place, size))

    def read(self, place: bytes, into: np.ndarray) -> None:
        self.reads += 1
        handle, at = msgspec.msgpack.decode(place)
        if handle not in self.opened:
            where, size = msgspec.msgpack.decode(handle)
            pid, fd = msgspec.msgpack.decode(where)
            with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
                self.opened[handle] = np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)
        into[:] = self.opened[handle][at : at + len(into)]

    def forget(self) -> None:
        self.opened.clear()


def transport_of(backend: str) -> Remote:
    if backend == "cuda_ipc":
        from bough.distributed.cuda_ipc import PageMemory

        return Ring(PageMemory(), RING_BYTES)
    return Ring(HostDevice(), RING_BYTES) if backend == "ring" else open_transport(backend)


def lend(connection: Any, backend: str) -> None:
    """Lends and takes back what it is told to: a number, in memory of a size."""
    transport, lent = transport_of(backend), {}
    while (order := connection.recv()) is not None:
        number, size = order
        if size:
            lent[number], loan = transport.lend(size, transport.gpus)
            lent[number][:] = number
            if backend == "cuda_ipc":  # as a prefill engine waits for its copies
                sys.modules["torch"].cuda.synchronize()
            connection.send(loan)
        else:
            del lent[number]
            connection.send(None)
