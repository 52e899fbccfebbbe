"""Publishes what the prefix cache stores and removes, for routers and other outside subscribers.

The form is the one that cache-aware routers of SGLang read: a ZeroMQ PUB socket whose messages have three frames,
topic, sequence number (8 bytes, big-endian) and a msgpack `KVEventBatch`. Subscribers that miss a number know that they
missed something, and can ask for it on the replay endpoint. Nothing is kept back for slow ones: a scheduler never
waits.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import msgspec
import zmq

from bough.core.errors import SettingsError
from bough.memory.tree.events import KVEvent


class PublisherConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--kv-events-config`, as JSON."""

    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one turn of the scheduler."""

    ts: float
    events: list[KVEvent]
    attn_dp_rank: int = 0


def parse_config(text: str) -> PublisherConfig:
    try:
        config = msgspec.json.decode(text, type=PublisherConfig)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"--kv-events-config: {error}.") from None
    if config.publisher != "zmq":
        raise SettingsError(f"--kv-events-config: the publisher must be 'zmq', got {config.publisher!r}.")
    return config


class KVEventPublisher:
    """Owns the sockets, the sequence number and the last batches."""

    def __init__(self, context: zmq.Context[Any], config: PublisherConfig) -> None:
        self._topic = config.topic.encode()
        self._pending: list[KVEvent] = []
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = _bind(context, zmq.PUB, config.endpoint)
        self._socket.setsockopt(zmq.SNDHWM, config.hwm)
        self._replay = None
        if config.replay_endpoint is not None:
            self._replay = _bind(context, zmq.ROUTER, config.replay_endpoint)

    def add(self, event: KVEvent) -> None:
        self._pending.append(event)

    def flush(self) -> None:
        """Sends what has gathered since the last call, and answers those who ask for what they missed."""
        if self._pending:
            payload = self._encoder.encode(KVEventBatch(time.time(), self._pending))
            self._socket.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), payload])
            self._sent.append((self._sequence, payload))
            self._sequence += 1
            self._pending = []
        if self._replay is not None:
            self._answer_replays(self._replay)

    def _answer_replays(self, socket: zmq.Socket[bytes]) -> None:
        """A request is a sequence number; the answer is every batch kept from there on, then an empty one with -1."""
        while socket.poll(0):
            client, *_, start = socket.recv_multipart()
            first = int.from_bytes(start, "big")
            for sequence, payload in self._sent:
                if sequence >= first:
                    socket.send_multipart([client, b"", sequence.to_bytes(8, "big"), payload])
            socket.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])


def _bind(context: zmq.Context[Any], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise SettingsError(f"--kv-events-config: cannot listen on {endpoint}: {error}.") from None
    return socket
