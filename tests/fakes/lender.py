"""A process that lends memory; of its own, so that it starts fast."""

from __future__ import annotations

from typing import Any

from bough.disaggregation.transports import open_transport


def lend(connection: Any, backend: str) -> None:
    """Lends and takes back what it is told to: a number, in memory of a size."""
    transport, lent = open_transport(backend), {}
    while (order := connection.recv()) is not None:
        number, size = order
        if size:
            lent[number], place = transport.lend(size)
            lent[number][:] = number
            connection.send(place)
        else:
            del lent[number]
            connection.send(b"")
