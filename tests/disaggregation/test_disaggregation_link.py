"""Two links over real sockets, on one thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zmq

from bough.core.errors import SettingsError
from bough.disaggregation.link import LANES, Link, _arrived
from bough.disaggregation.wire import Beat, Cancel, Failed, Mapped, Pages, ToDecode, ToPrefill
from tests.system.pairs import free_port

KEY = "k" * 32
PATIENCE_S = 20.0


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[Any, Any, bytes | None]] = []
        self.missing: list[str] = []

    def receive(self, peer: Any, message: Any, payload: Any, now: float) -> None:
        place = len(self.heard)
        self.heard.append((peer, message, None if isinstance(payload, Future | None) else payload.tobytes()))
        if isinstance(payload, Future):
            payload.add_done_callback(lambda done: self.fill(place, done.result().tobytes()))

    def fill(self, place: int, content: bytes) -> None:
        self.heard[place] = (*self.heard[place][:2], content)

    def lost(self, peer: str) -> None:
        self.missing.append(peer)

    def tick(self, now: float) -> None:
        pass


class Ends:
    def __init__(self, keys: tuple[str | None, str | None] = (None, None), silence_s: float = 2.0) -> None:
        self.contexts: list[zmq.Context[Any]] = [zmq.Context(), zmq.Context()]
        self.where = f"127.0.0.1:{free_port()}"
        self.prefill = Link(self.contexts[0], ToPrefill, silence_s, keys[0], f"tcp://{self.where}")
        self.decode = Link(self.contexts[1], ToDecode, silence_s, keys[1])
        self.sides = Listener(), Listener()

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            for link, side in zip((self.prefill, self.decode), self.sides, strict=True):
                link.poller.poll(5)
                link.turn(side)  # type: ignore[arg-type]

    def close(self) -> None:
        for context in self.contexts:
            context.destroy(linger=0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_messages_and_pages_go_both_ways(ends: Ends) -> None:
    prefill, decode = ends.sides
    ends.decode.send(ends.where, Cancel(7))
    ends.until(lambda: prefill.heard)
    peer, message, _ = prefill.heard[0]
    assert message == Cancel(7)
    pages = Pages(7, [], "default")
    assert ends.prefill.send(peer, pages, np.arange(200, dtype=np.uint8))
    assert ends.prefill.send(peer, Failed(7, "why"))
    ends.until(lambda: len(decode.heard) == 2 and decode.heard[0][2])
    assert decode.heard == [(ends.where, pages, bytes(range(200))), (ends.where, Failed(7, "why"), None)]
    assert not decode.missing


def test_pages_come_by_several_connections_and_messages_keep_their_order(ends: Ends) -> None:
    prefill, decode = ends.sides
    ends.decode.send(ends.where, Cancel(7))
    ends.until(lambda: prefill.heard and len(ends.decode._dealers[ends.where]) == 1 + LANES)
    peer, came = prefill.heard[0][0], [0] * (1 + LANES)
    lanes = {dealer: lane for lane, (dealer, _) in enumerate(ends.decode._dealers[ends.where])}

    def arrived(socket: Any) -> list[list[Any]]:
        found = _arrived(socket)
        came[lanes.get(socket, 0)] += len(found)
        return found

    with patch("bough.disaggregation.link._arrived", arrived):
        deadline, sent = time.monotonic() + PATIENCE_S, list[int]()
        while min(came[1:]) < 2:  # until all are connected, pages come with their messages
            assert time.monotonic() < deadline
            for number in range(len(sent), len(sent) + LANES):
                content = np.full(300_000, number % 256, dtype=np.uint8)
                assert ends.prefill.send(peer, Pages(number, [], "default"), content)
                sent.append(number)
            ends.until(lambda: len(decode.heard) == len(sent) and all(payload for *_, payload in decode.heard))
    assert [message.room for _, message, _ in decode.heard] == sent
    assert all(payload == bytes([number % 256]) * 300_000 for number, (*_, payload) in enumerate(decode.heard))
    assert not ends.decode._payloads and not decode.missing


def test_an_engine_that_ends_is_missed_and_one_that_comes_back_is_found(ends: Ends) -> None:
    prefill, decode = ends.sides
    ends.decode.send(ends.where, Cancel(1))
    ends.until(lambda: prefill.heard)
    ends.contexts[0].destroy(linger=0)
    deadline = time.monotonic() + PATIENCE_S
    while not decode.missing and time.monotonic() < deadline:
        ends.decode.turn(decode)  # type: ignore[arg-type]
    assert decode.missing == [ends.where]
    ends.contexts[0] = zmq.Context()
    ends.prefill = Link(ends.contexts[0], ToPrefill, 2.0, None, f"tcp://{ends.where}")
    ends.decode.send(ends.where, Cancel(2))
    ends.until(lambda: len(prefill.heard) == 2)
    assert prefill.heard[-1][1] == Cancel(2)


def test_a_listening_engine_finds_out_when_it_sends(ends: Ends) -> None:
    prefill, _ = ends.sides
    ends.decode.send(ends.where, Mapped(b"3"))
    ends.until(lambda: prefill.heard)
    peer = prefill.heard[0][0]
    assert ends.prefill.send(peer, Beat(3))
    ends.contexts[1].destroy(linger=0)
    deadline = time.monotonic() + PATIENCE_S
    while ends.prefill.send(peer, Beat(3)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Forgetful:
    """A firewall on the way. It forgets connections without a word to either end: what comes by them is dropped."""

    def __init__(self, to: str) -> None:
        host, port = to.split(":")
        self._to, self._epoch, self._held = (host, int(port)), 0, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.where = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self._held += near, far
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(*pair, self._epoch), daemon=True).start()

    def _carry(self, origin: socket.socket, to: socket.socket, epoch: int) -> None:
        with contextlib.suppress(OSError):
            while content := origin.recv(1 << 16):
                if epoch == self._epoch:
                    to.sendall(content)

    def forget(self) -> None:
        self._epoch += 1

    def close(self) -> None:
        for each in (self._listener, *self._held):
            each.close()


def test_a_connection_that_was_forgotten_while_idle_is_missed_and_made_anew() -> None:
    """Before a request comes, and though neither end was told."""
    ends = Ends(silence_s=0.4)
    way, (prefill, decode) = Forgetful(ends.where), ends.sides
    ends.decode.send(way.where, Cancel(1))
    ends.until(lambda: prefill.heard)
    first = prefill.heard[0][0]
    way.forget()
    ends.until(lambda: decode.missing == [way.where])
    ends.decode.send(way.where, Cancel(2))
    ends.until(lambda: len(prefill.heard) == 2)
    assert prefill.heard[1][1] == Cancel(2)
    assert ends.prefill.send(prefill.heard[1][0], Beat(2))
    ends.until(lambda: decode.heard == [(way.where, Beat(2), None)])
    ends.until(lambda: not ends.prefill.send(first, Beat(1)))  # whose rooms are then let go
    way.close()
    ends.close()


@pytest.mark.parametrize(("keys", "heard"), [((KEY, KEY), True), ((KEY, None), False), ((KEY, "x" * 32), False)])
def test_nobody_gets_through_without_the_key(keys: tuple[str | None, str | None], heard: bool) -> None:
    ends = Ends(keys, silence_s=PATIENCE_S if heard else 0.6)
    prefill, decode = ends.sides
    ends.decode.send(ends.where, Cancel(1))
    ends.until(lambda: prefill.heard or decode.missing)
    assert bool(prefill.heard) == heard
    ends.close()


def test_an_engine_that_is_not_there_is_missed() -> None:
    ends = Ends(silence_s=0.4)
    ends.decode.send("127.0.0.1:1", Cancel(1))
    ends.until(lambda: ends.sides[1].missing == ["127.0.0.1:1"])
    assert not ends.decode.send("not an address", Cancel(1))
    ends.close()


def test_a_port_that_is_taken_is_a_clear_error(ends: Ends) -> None:
    with pytest.raises(SettingsError, match="give another --disaggregation-bootstrap-port"):
        Link(ends.contexts[0], ToPrefill, 2.0, None, f"tcp://{ends.where}")
