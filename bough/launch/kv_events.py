"""Publishes what the prefix cache stores and removes, in the form of SGLang's publisher.

Messages on a ZeroMQ PUB socket have three frames: topic, sequence number (8 bytes, big-endian) and the msgpack of a
`KVEventBatch`. What a slow subscriber does not take is lost to it; it can ask for that on the replay endpoint, which a
thread answers, because the scheduler sleeps while there is nothing to do. Events hold the tokens of every prompt: with
a key only its holders get any, without one an endpoint that other machines can reach is logged as a warning.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from bough.core.errors import SettingsError
from bough.memory.tree.event_key import DOMAIN, EventKey, read_key
from bough.memory.tree.events import END_OF_REPLAY, KVEvent, KVEventBatch, PublisherConfig, is_exposed

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger(__name__)

MOST_RECEIVED_BYTES = 4096  # in a frame: handshakes, topics and numbers are far shorter
MOST_KEPT_BYTES = 256 << 20


class KVEventPublisher:
    """Owns the sockets, with a context that is theirs alone (its authenticator answers for all in it), and the sequence
    number."""

    def __init__(self, config: PublisherConfig) -> None:
        self._topic = config.topic.encode()
        self._pending: list[KVEvent] = []
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._replays: Replays | None = None
        key = None if config.key_file is None else read_key(config.key_file)
        with contextlib.ExitStack() as cleanup:
            context: zmq.Context[Any] = zmq.Context()
            cleanup.callback(context.term)
            if key is not None:
                cleanup.callback(_start_authenticator(context, key).stop)
            self._socket = _bind(context, zmq.PUB, config.endpoint, config.hwm, key)
            cleanup.callback(self._socket.close)
            if config.replay_endpoint is not None:
                self._replays = Replays(context, config.replay_endpoint, config.buffer_steps, key)
            self._cleanup = cleanup.pop_all()

    def add(self, event: KVEvent) -> None:
        self._pending.append(event)

    def flush(self) -> None:
        if not self._pending:
            return
        payload = self._encoder.encode(KVEventBatch(time.time(), self._pending))
        if self._replays is not None:
            self._replays.keep(self._sequence, payload)  # first: whoever has seen the number may ask for it
        self._socket.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1
        self._pending = []

    def close(self) -> None:
        self._cleanup.close()


class Replays:
    """Owns the last batches, and the thread and socket that send them again; both end with the context."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, buffer_steps: int, key: EventKey | None) -> None:
        self._most = buffer_steps
        self._kept: deque[tuple[int, zmq.Frame]] = deque()  # frames: every answer sends the same memory
        self._kept_bytes = 0
        self._lock = threading.Lock()
        # Room for a whole answer, also while the reading of the one before is only half accounted for: ZeroMQ does that
        # in halves of the limit.
        socket = _bind(context, zmq.ROUTER, endpoint, 2 * (buffer_steps + 1), key)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells of a client that has no room, instead of leaving holes
        threading.Thread(target=self._serve, args=(socket,), name="kv-event-replays", daemon=True).start()

    def keep(self, sequence: int, payload: bytes) -> None:
        with self._lock:
            self._kept.append((sequence, zmq.Frame(payload, copy=True)))
            self._kept_bytes += len(payload)
            while len(self._kept) > self._most or self._kept_bytes > MOST_KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        try:
            while True:
                self._answer(socket, *socket.recv_multipart())
        except zmq.ContextTerminated:
            socket.close()

    def _answer(self, socket: zmq.Socket[bytes], client: bytes, *request: bytes) -> None:
        """A request is a sequence number; the answer is every batch kept from there on, then an empty one with -1."""
        first = int.from_bytes(request[-1], "big")
        with self._lock:
            asked = [(sequence, payload) for sequence, payload in self._kept if sequence >= first]
        try:
            for sequence, payload in asked:
                answer: list[bytes | zmq.Frame] = [client, b"", sequence.to_bytes(8, "big"), payload]
                socket.send_multipart(answer, zmq.NOBLOCK, copy=False)
            socket.send_multipart([client, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError as error:  # it has left, or asks again and again and does not read
            log.debug("a replay of cache events was broken off: %s", error)


def _start_authenticator(context: zmq.Context[Any], key: EventKey) -> ThreadAuthenticator:
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context, log=log)
    authenticator.configure_curve_callback(DOMAIN, key)
    authenticator.start()
    return authenticator


def _bind(
    context: zmq.Context[Any], kind: int, endpoint: str, most_waiting: int, key: EventKey | None
) -> zmq.Socket[bytes]:
    if key is None and is_exposed(endpoint):
        log.warning(
            "--kv-events-config: any process that reaches %s can read the tokens of all prompts. Give both ends a key "
            '("key_file" here, --kv-events-key-file at the gateway), or listen on tcp://127.0.0.1.',
            endpoint,
        )
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, most_waiting)  # before `bind`: connections made earlier keep the old limit
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_RECEIVED_BYTES)
    if key is not None:
        key.guard(socket)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise SettingsError(f"--kv-events-config: cannot listen on {endpoint}: {error}.") from None
    return socket
