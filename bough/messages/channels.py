"""Channels between the processes of one engine: ZeroMQ push/pull over files in a private folder.

A receiver binds and its senders connect. Queues are unbounded, because each party bounds what it sends by the requests
it has taken, and a sender must never block: a scheduler that waits for a slow reader would stall every request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where each process of an engine listens."""

    scheduler: str
    detokenizer: str
    client: str

    @classmethod
    def in_folder(cls, folder: Path) -> Addresses:
        """The folder must be private to the user: whoever can open these files can talk to the engine."""
        return cls(*(f"ipc://{folder}/{name}" for name in ("scheduler", "detokenizer", "client")))


class Sender:
    """The sending end of a channel."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)  # milliseconds: last words get out, a dead peer holds up nobody
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send(self._encoder.encode(message), copy=False)

    def close(self) -> None:
        self._socket.close()


class Receiver(Generic[M]):
    """The receiving end of a channel; `union` is the type of everything that may arrive."""

    def __init__(self, context: zmq.Context[Any], address: str, union: Any) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decoder = decoder_of(union)

    def receive(self, timeout_s: float | None = 0.0) -> list[M]:
        """Everything that has arrived. Waits up to `timeout_s` (None: for ever) for a first message."""
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000)
        messages: list[M] = []
        if timeout_s != 0.0 and not self._socket.poll(timeout_ms):
            return messages
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(frame))

    def close(self) -> None:
        self._socket.close(linger=0)


def decoder_of(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """Reads any message of a receiver's union."""
    return msgspec.msgpack.Decoder(union)
