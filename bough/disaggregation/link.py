"""Carries messages between engines, over ZeroMQ, on the scheduler's thread: `PairInbox` waits for them as well.

A prefill engine listens; a decode engine connects to as many as its requests name. ZeroMQ's own thread sends, and asks
for signs of life, while a step runs. With the cluster's key nobody without it gets through. A decode engine has several
connections to each prefill engine: pages come by the others, so that several threads encrypt and copy them.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from bough.core.errors import SettingsError
from bough.core.finish import FinishAbort
from bough.core.parallel_settings import DisaggregationSettings
from bough.core.plan import Executor
from bough.disaggregation.transports import Remote
from bough.disaggregation.wire import Buffer, Identity
from bough.messages.channels import TCP, Receiver, use_key
from bough.messages.outputs import WEIGHT_VERSION
from bough.messages.requests import Generate, ToScheduler
from bough.scheduler.handover import Handover, Passing
from bough.scheduler.ports import Outbox
from bough.scheduler.request import Request

log = logging.getLogger(__name__)

TICK_S = 0.25
LANES = 4  # connections for pages, beside that for messages
WATCHED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class Side(Handover):
    """What both sides of a pair have in common."""

    def __init__(
        self,
        executor: Executor,
        outbox: Outbox,
        link: Link,
        identity: Identity,
        settings: DisaggregationSettings,
        transport: Remote,
    ) -> None:
        super().__init__()
        self._executor, self._outbox, self._link, self._identity = executor, outbox, link, identity
        self._settings, self._transport, self._limits = settings, transport, executor.limits()
        self._rooms: Mapping[int, Any] = {}
        self._passing: list[tuple[Request, FinishAbort | None]] = []

    def passed(self) -> list[Passing]:
        """They wait here until now, because they may be aborted before."""
        passing, self._passing = self._passing, []
        going = [(request, self.pop(request), None) for request, why in passing if why is None and request in self]
        return going + [(request, None, why) for request, why in passing if why is not None]

    @property
    def weight_version(self) -> str:
        return self._facts.get("weight_version", WEIGHT_VERSION)

    def stays(self, message: Generate) -> bool:
        """Whether it is computed where it arrives: vectors are not handed over, nor what recordings leave on rows."""
        return message.pooling is not None or self._limits.speech is not None

    def waits(self) -> bool:
        """Whether time must not pass unnoticed."""
        return bool(self._rooms)

    def receive(self, peer: Any, message: Any, payload: Any, now: float) -> None:
        """Of pages, the payload or its future."""
        raise NotImplementedError

    def lost(self, peer: str) -> None:
        """There is no connection to that engine, or none any more. A listening one finds out when it sends."""

    def tick(self, now: float) -> None:
        raise NotImplementedError


class Link:
    def __init__(
        self, context: zmq.Context[Any], union: Any, silence_s: float, key: str | None, listen: str | None = None
    ) -> None:
        self._context, self._key, self._silence_s = context, key, silence_s
        self.poller = zmq.Poller()
        self.requests: list[Generate] = []  # that other engines have brought
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._dealers: dict[str, list[tuple[zmq.Socket[Any], zmq.Socket[Any]]]] = {}  # with their monitors
        self._payloads: dict[tuple[str, bytes], Future[Buffer]] = {}  # whose messages come apart from them
        self._sent = 0
        self._apart: dict[str, float] = {}  # since when, of those without a connection
        self._router = None if listen is None else self._socket(zmq.ROUTER)
        if self._router is not None and listen is not None:
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            try:
                self._router.bind(listen)
            except zmq.ZMQError as error:
                raise SettingsError(f"{listen}: {error}; give another --disaggregation-bootstrap-port.") from None

    def send(self, peer: Any, message: Any, payload: Buffer | None = None) -> bool:
        """False: there is no such engine (any more)."""
        frames: list[Any] = [msgspec.msgpack.encode(message)]
        try:
            if self._router is not None:
                frames += [] if payload is None else self._send_apart(self._router, peer, payload)
                self._router.send_multipart([peer, *frames], zmq.NOBLOCK, copy=payload is None)
            else:
                self._dealer(peer).send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _send_apart(self, router: zmq.Socket[Any], peer: bytes, payload: Buffer) -> list[Any]:
        """What its message has in its place: a stamp, or the payload itself, while there is no other connection."""
        self._sent += 1
        stamp = self._sent.to_bytes(8, "little")
        try:
            router.send_multipart([peer + bytes([self._sent % LANES]), stamp, payload.data], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return [payload.data]
        return [b"", stamp]

    def turn(self, side: Side) -> None:
        now = time.monotonic()
        if self._router is not None:
            for frames in _arrived(self._router):
                self._take(side, frames[0].bytes, frames[1:], now)
        for peer, lanes in list(self._dealers.items()):
            gone = [now - self._apart.get(peer, now) > self._silence_s, *[False] * LANES]
            for lane, (dealer, monitor) in enumerate(lanes):
                for frames in _arrived(dealer):
                    if lane:
                        self._payload(peer, frames[0].bytes).set_result(np.frombuffer(frames[1].buffer, np.uint8))
                    else:
                        self._take(side, peer, frames, now)
                while monitor.poll(0):
                    self._apart.pop(peer, None)
                    gone[lane] = recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
            if any(gone):
                self._drop(peer)
                side.lost(peer)
        side.tick(now)

    def _take(self, side: Side, peer: Any, frames: list[Any], now: float) -> None:
        payload: Buffer | Future[Buffer] | None = None
        if len(frames) > 1:
            apart = len(frames) > 2
            payload = self._payload(peer, frames[2].bytes) if apart else np.frombuffer(frames[1].buffer, np.uint8)
        try:
            message = self._decode(frames[0].buffer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("a message of another engine cannot be read: %s", error)
        else:
            side.receive(peer, message, payload, now)

    def _payload(self, peer: str, stamp: bytes) -> Future[Buffer]:
        """Is asked twice: for the message and for the payload itself, whichever comes first."""
        known = self._payloads.pop((peer, stamp), None)
        if known is None:
            known = self._payloads[peer, stamp] = Future()
        return known

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        beat_ms = int(self._silence_s * 1000)
        options = {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 500, zmq.IPV6: 1}
        options |= {zmq.HEARTBEAT_IVL: beat_ms // 4, zmq.HEARTBEAT_TIMEOUT: beat_ms}
        for option, value in options.items():
            socket.setsockopt(option, value)
        if self._key is not None:
            use_key(socket, self._key, listens=kind == zmq.ROUTER)
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def _drop(self, peer: str) -> None:
        """What it has not got, it will not get."""
        self._apart.pop(peer, None)
        self._payloads = {key: payload for key, payload in self._payloads.items() if key[0] != peer}
        for dealer, monitor in self._dealers.pop(peer):
            for socket in (dealer, monitor):
                self.poller.unregister(socket)
            dealer.disable_monitor()
            dealer.close(linger=0)

    def _dealer(self, peer: str) -> zmq.Socket[Any]:
        if peer not in self._dealers:
            self._dealers[peer], self._apart[peer], name = [], time.monotonic(), uuid.uuid4().hex.encode()
            for own in (name, *(name + bytes([lane]) for lane in range(LANES))):
                dealer = self._socket(zmq.DEALER)
                dealer.setsockopt(zmq.ROUTING_ID, own)
                monitor = dealer.get_monitor_socket(WATCHED)
                self.poller.register(monitor, zmq.POLLIN)
                self._dealers[peer].append((dealer, monitor))
                dealer.connect(f"{TCP}{peer}")
        return self._dealers[peer][0][0]


def _arrived(socket: zmq.Socket[Any]) -> list[list[Any]]:
    found = []
    with contextlib.suppress(zmq.Again):
        while True:
            found.append(socket.recv_multipart(zmq.NOBLOCK, copy=False))
    return found


class PairInbox:
    """The scheduler's inbox, and the messages of other engines, which go to its side of the pair."""

    def __init__(self, receiver: Receiver[Any], link: Link, side: Side) -> None:
        self._receiver, self._link, self._side = receiver, link, side
        link.poller.register(receiver.socket, zmq.POLLIN)

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        if timeout_s != 0.0:
            if self._side.waits():
                timeout_s = min(TICK_S, TICK_S if timeout_s is None else timeout_s)
            self._link.poller.poll(None if timeout_s is None else int(timeout_s * 1000))
        self._link.turn(self._side)
        brought, self._link.requests = self._link.requests, []
        return [*brought, *self._receiver.receive(0.0)]
