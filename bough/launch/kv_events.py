"""Publishes what the prefix cache stores and removes, for routers and other outside subscribers.

The form is the one that SGLang's publisher uses: a ZeroMQ PUB socket whose messages have three frames, topic, sequence
number (8 bytes, big-endian) and the msgpack of a `KVEventBatch`, an array whose events are arrays in turn (their fields
are in `bough.memory.tree.events`). Nobody is waited for: what a slow subscriber does not take is lost to it. It sees
the gap in the numbers and can ask for what it missed on the replay endpoint. A thread of its own answers there, because
the scheduler sleeps while there is nothing to do.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from bough.core.errors import SettingsError
from bough.memory.tree.event_wire import END_OF_REPLAY, KVEventBatch, PublisherConfig
from bough.memory.tree.events import KVEvent


class KVEventPublisher:
    """Owns the publishing socket and the sequence number."""

    def __init__(self, context: zmq.Context[Any], config: PublisherConfig) -> None:
        self._topic = config.topic.encode()
        self._pending: list[KVEvent] = []
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = _bind(context, zmq.PUB, config.endpoint, config.hwm)
        self._replays = None
        if config.replay_endpoint is not None:
            self._replays = Replays(config.replay_endpoint, config.buffer_steps)

    def add(self, event: KVEvent) -> None:
        self._pending.append(event)

    def flush(self) -> None:
        """Sends what has gathered since the last call."""
        if not self._pending:
            return
        payload = self._encoder.encode(KVEventBatch(time.time(), self._pending))
        if self._replays is not None:
            self._replays.keep(self._sequence, payload)  # first: whoever has seen the number may ask for it
        self._socket.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1
        self._pending = []

    def close(self) -> None:
        self._socket.close()
        if self._replays is not None:
            self._replays.close()


class Replays:
    """Owns the last batches, and the thread and socket that send them again.

    The socket has a context of its own: ending that context is the one safe way to wake a thread out of it.
    """

    def __init__(self, endpoint: str, buffer_steps: int) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._lock = threading.Lock()
        self._context: zmq.Context[Any] = zmq.Context()
        socket = _bind(self._context, zmq.ROUTER, endpoint, hwm=0)  # no limit: an answer with holes would be of no use
        self._thread = threading.Thread(target=self._serve, args=(socket,), name="kv-event-replays", daemon=True)
        self._thread.start()

    def keep(self, sequence: int, payload: bytes) -> None:
        with self._lock:
            self._kept.append((sequence, payload))

    def close(self) -> None:
        self._context.term()
        self._thread.join()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        try:
            while True:
                self._answer(socket)
        except zmq.ContextTerminated:
            socket.close()

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        """A request is a sequence number; the answer is every batch kept from there on, then an empty one with -1."""
        client, *_, start = socket.recv_multipart()
        first = int.from_bytes(start, "big")
        with self._lock:
            asked = [(sequence, payload) for sequence, payload in self._kept if sequence >= first]
        for sequence, payload in asked:
            socket.send_multipart([client, b"", sequence.to_bytes(8, "big"), payload])
        socket.send_multipart([client, b"", END_OF_REPLAY, b""])


def _bind(context: zmq.Context[Any], kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, hwm)  # before `bind`: connections made earlier keep the old limit
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise SettingsError(f"--kv-events-config: cannot listen on {endpoint}: {error}.") from None
    return socket
