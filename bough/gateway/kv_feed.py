"""Follows the cache events that workers publish, and passes them to the policy that routes by them.

Messages are numbered. Lost ones are fetched from the worker's replay endpoint; without one, and after a broken
connection, the worker's index starts empty, so that it never holds what the worker does not.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from bough.gateway.policies.kv_events import KVEventsPolicy
from bough.memory.tree.event_key import EventKey
from bough.memory.tree.events import END_OF_REPLAY, KVEventBatch
from bough.server.http import cancel_all, race

REPLAY_PATIENCE_S = 2.0
RECONNECT_PAUSE_S = 0.1
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
EVERYWHERE = ("*", "0.0.0.0", "[::]")

log = logging.getLogger(__name__)
decode_batch = msgspec.msgpack.Decoder(KVEventBatch).decode


class Publisher(msgspec.Struct, frozen=True):
    """The part of a worker's --kv-events-config that a subscriber needs."""

    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    key_file: str | None = None  # a path there; here it only says that a key is needed


def reachable(endpoint: str, worker_url: str) -> str:
    """The address of an endpoint that a worker listens on: a wildcard means the worker's host."""
    scheme, _, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or host not in EVERYWHERE:
        return endpoint
    name = urlsplit(worker_url).hostname or "127.0.0.1"
    return f"tcp://[{name}]{colon}{port}" if ":" in name else f"tcp://{name}{colon}{port}"


class KVFeed:
    def __init__(self, key: EventKey | None = None) -> None:
        self._key = key
        self._context = zmq.asyncio.Context()
        self._following: dict[tuple[str, KVEventsPolicy], asyncio.Task[None]] = {}

    def follows(self, worker_id: str, observer: KVEventsPolicy) -> bool:
        return (worker_id, observer) in self._following

    def follow(self, worker_id: str, url: str, config: str | None, observer: KVEventsPolicy) -> bool:
        """False if the worker publishes nothing usable."""
        self.unfollow(worker_id, observer)
        if config is None:
            return False
        try:
            publisher = msgspec.json.decode(config, type=Publisher)
        except msgspec.MsgspecError as error:
            log.warning("worker %s: its cache events cannot be followed: %s", worker_id, error)
            return False
        if publisher.key_file is not None and self._key is None:
            missing = f"the key in its {publisher.key_file}; give the gateway that file with --kv-events-key-file"
            log.warning("worker %s: its cache events need %s", worker_id, missing)
            return False
        subscription = Subscription(self._context, worker_id, url, publisher, observer, self._key)
        self._following[worker_id, observer] = asyncio.get_running_loop().create_task(subscription.run())
        return True

    def unfollow(self, worker_id: str, observer: KVEventsPolicy) -> None:
        task = self._following.pop((worker_id, observer), None)
        if task is not None:
            task.cancel()
            observer.unobserved(worker_id)

    async def close(self) -> None:
        await cancel_all(self._following.values())
        self._context.destroy(linger=0)


@dataclass(slots=True, eq=False)
class Subscription:
    context: zmq.asyncio.Context
    worker_id: str
    url: str
    publisher: Publisher
    observer: KVEventsPolicy
    key: EventKey | None
    next: int = 0  # the number that the next message should have
    refused: bool = False

    async def run(self) -> None:
        try:
            while True:
                self._start_anew(0)
                await self._follow_connection()
                await asyncio.sleep(RECONNECT_PAUSE_S)  # who refuses us refuses at once
        except (zmq.ZMQError, msgspec.MsgspecError, ValueError, OverflowError) as error:
            log.warning("worker %s: its cache events cannot be followed: %s", self.worker_id, error)
            self.observer.unobserved(self.worker_id)

    async def _follow_connection(self) -> None:
        """Takes events until the connection breaks."""
        socket = self._open(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt_string(zmq.SUBSCRIBE, self.publisher.topic)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES)
        try:
            socket.connect(reachable(self.publisher.endpoint, self.url))
            reading = asyncio.ensure_future(self._read(socket))
            broken = asyncio.ensure_future(monitor.recv_multipart())
            await race(reading, broken)
            if reading.cancelled():
                self._note_refusal(parse_monitor_message(broken.result())["event"])
            else:
                reading.result()
        finally:
            socket.disable_monitor()
            socket.close(linger=0)

    def _open(self, kind: int) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        if self.key is not None and self.publisher.key_file is not None:
            self.key.present(socket)
        return socket

    def _note_refusal(self, event: int) -> None:
        if event & HANDSHAKE_FAILURES and not self.refused:
            self.refused = True
            where = reachable(self.publisher.endpoint, self.url)
            advice = "--kv-events-key-file must be the file that its key_file names, and neither may be missing"
            log.warning("worker %s: %s refuses to send its cache events; %s", self.worker_id, where, advice)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        await self._catch_up()
        while True:
            _, number, payload = await socket.recv_multipart()
            await self._take(int.from_bytes(number, "big"), payload)

    async def _take(self, number: int, payload: bytes) -> None:
        if number > self.next:
            await self._catch_up()
        if number > self.next:
            self._start_anew(number)
        if number == self.next:  # else it came with a replay
            self._apply(payload)

    def _apply(self, payload: bytes) -> None:
        self.next += 1
        for event in decode_batch(payload).events:
            self.observer.observe(self.worker_id, event)

    def _start_anew(self, number: int) -> None:
        self.observer.restart(self.worker_id)
        self.next = number

    async def _catch_up(self) -> None:
        """Asks for everything from the next number on, as far back as the worker keeps it."""
        if not self.publisher.replay_endpoint:
            return
        endpoint = reachable(self.publisher.replay_endpoint, self.url)
        socket = self._open(zmq.DEALER)
        try:
            socket.connect(endpoint)
            await socket.send_multipart([b"", self.next.to_bytes(8, "big")])
            async with asyncio.timeout(REPLAY_PATIENCE_S):
                while True:
                    *_, number, payload = await socket.recv_multipart()
                    if number == END_OF_REPLAY:
                        return
                    if (kept := int.from_bytes(number, "big")) > self.next:  # older ones are kept no more
                        self._start_anew(kept)
                    if kept == self.next:
                        self._apply(payload)
        except TimeoutError:
            log.warning("worker %s: no answer at its replay endpoint %s", self.worker_id, endpoint)
        finally:
            socket.close(linger=0)
