"""The thread that carries messages between a desk and other engines, over ZeroMQ.

It lives beside the scheduler's thread, so signs of life go on while a step runs. A prefill engine listens; a decode
engine connects to as many as its requests name. With the cluster's key nobody without it gets through.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from bough.core.errors import SettingsError
from bough.disaggregation.wire import Buffer
from bough.messages.channels import TCP, Sender, use_key
from bough.messages.requests import Generate, Transferred

log = logging.getLogger(__name__)

TICK_S = 0.25
BEAT_MS, SILENCE_MS = 1000, 5000  # of connections, so that one that was cut during hours of silence is made anew


class Desk(Protocol):
    def receive(self, peer: Any, message: Any, payload: Buffer | None, now: float) -> None: ...

    def obey(self, order: Any, now: float) -> None: ...

    def tick(self, now: float) -> None: ...


class Link:
    """`order` may be called by the scheduler's thread, which finds what the desk tells it in `news` and is woken."""

    def __init__(
        self,
        make_desk: Callable[[Callable[..., None], Callable[[Any], None]], Desk],
        union: Any,
        scheduler: str,
        key: str | None,
        listen: str | None = None,
    ) -> None:
        self.news: SimpleQueue[Any] = SimpleQueue()
        self._orders: SimpleQueue[Any] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._key, self._scheduler = key, scheduler
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._router: zmq.Socket[Any] | None = None
        self._dealers: dict[str, zmq.Socket[Any]] = {}
        if listen is not None:
            self._router = self._socket(zmq.ROUTER, listens=True)
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            try:
                self._router.bind(listen)
            except zmq.ZMQError as error:
                raise SettingsError(
                    f"The bootstrap server cannot listen at {listen} ({error}); give another "
                    "--disaggregation-bootstrap-port."
                ) from None
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._desk = make_desk(self._send, self._tell)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="bough-pages", daemon=True)
        self._thread.start()

    def order(self, order: Any) -> None:
        self._orders.put(order)
        os.eventfd_write(self._wake, 1)

    def take_news(self) -> list[Any]:
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self.news.get_nowait())
        return found

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _socket(self, kind: int, *, listens: bool) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500)):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.ipv6 = True
        if self._key is not None:
            use_key(socket, self._key, listens=listens)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _run(self) -> None:
        inbox = Sender(self._context, self._scheduler)
        self._inbox = inbox
        ticked_s = time.monotonic()
        try:
            while not self._closing:
                for readable, _ in self._poller.poll(int(TICK_S * 1000)):
                    if isinstance(readable, int):
                        os.eventfd_read(self._wake)
                    else:
                        self._receive(readable)
                with contextlib.suppress(Empty):
                    while True:
                        self._desk.obey(self._orders.get_nowait(), time.monotonic())
                if time.monotonic() - ticked_s >= TICK_S:
                    ticked_s = time.monotonic()
                    self._desk.tick(ticked_s)
        except Exception:
            log.exception("the link to other engines has failed; the engine ends, because its requests would hang")
            os._exit(1)
        finally:
            inbox.close()
            self._context.destroy(linger=500)

    def _receive(self, socket: zmq.Socket[Any]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                peer: Any = next((name for name, own in self._dealers.items() if own is socket), None)
                if peer is None:
                    peer, frames = frames[0].bytes, frames[1:]
                try:
                    message = self._decode(frames[0].buffer)
                except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
                    log.warning("a message of another engine cannot be read: %s", error)
                    continue
                payload = np.frombuffer(frames[1].buffer, dtype=np.uint8) if len(frames) > 1 else None
                self._desk.receive(peer, message, payload, time.monotonic())

    def _send(self, peer: Any, message: Any, payload: Buffer | None) -> None:
        frames: list[Any] = [self._encode(message)]
        if payload is not None:
            frames.append(payload.data)
        with contextlib.suppress(zmq.ZMQError):  # an address that cannot be; its silence is noticed
            socket = self._router
            if socket is None:
                socket = self._dealer(peer)
            else:
                frames.insert(0, peer)
            socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None)

    def _dealer(self, peer: str) -> zmq.Socket[Any]:
        if peer not in self._dealers:
            dealer = self._dealers[peer] = self._socket(zmq.DEALER, listens=False)
            dealer.setsockopt(zmq.ROUTING_ID, uuid.uuid4().hex.encode())  # the same after the connection was made anew
            dealer.connect(f"{TCP}{peer}")
        return self._dealers[peer]

    def _tell(self, news: Any) -> None:
        if isinstance(news, Generate):
            self._inbox.send(news)
            return
        self.news.put(news)
        self._inbox.send(Transferred())
