"""LMCache's server as a store: the real one where it is installed, and one that answers like it otherwise."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.core.errors import SettingsError
from bough.storage import lmcache as lmcache_module
from bough.storage.backends import open_store
from bough.storage.store import HEADER, Store, header_of
from tests.storage.lmcache_server import lmcache_server
from tests.storage.store_checks import KEYS, SIZE, check_store, content, empty

QUESTION, ANSWER = "iiiiiiiii150s", "iiiiiiiii"
PUT, GET, EXIST = 1, 2, 3


class Answers:
    """A server with LMCache's protocol and manners: what it has half got it keeps, and hangs up when asked for it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes | None] = {}
        self.sizes: dict[str, int] = {}
        self.links: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        for link in self.links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link = self._listener.accept()[0]
                self.links.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        def receive(count: int) -> bytes | None:
            found = b""
            while len(found) < count:
                piece = link.recv(count - len(found))
                if not piece:
                    return None
                found += piece
            return found

        def answer(outcome: int, size: int = 0) -> None:
            link.sendall(struct.pack(ANSWER, outcome, size, 1, 1, size, 0, 0, 0, 0))

        with contextlib.suppress(OSError), link:
            while asked := receive(struct.calcsize(QUESTION)):
                command, size, form, dtype, place, *shape, name = struct.unpack(QUESTION, asked)
                model, ranks, rank, hashed, kind = name.decode().strip().split("@")
                assert (form, dtype, place) == (1, 6, 0) and shape == [size, 0, 0, 0]
                assert (model, int(ranks), int(rank), kind) == ("bough", 1, 0, "uint8")
                key = f"{int(hashed, 16):064x}"
                if command == PUT:
                    self.values[key], self.sizes[key] = receive(size), size
                elif command == EXIST:
                    answer(200 if key in self.values else 400)
                elif key not in self.values:
                    answer(400)
                else:
                    answer(200, self.sizes[key])
                    value = self.values[key]
                    if value is None:
                        return
                    link.sendall(value)


@pytest.fixture
def answers() -> Iterator[Answers]:
    found = Answers()
    yield found
    found.close()


def open_lmcache(url: str, **options: Any) -> Store:
    return open_store("lmcache", json.dumps({"url": url, **options}))


def check_server(url: str) -> None:
    """What holds for LMCache's own server, too."""
    store, other = open_lmcache(url), open_lmcache(url)
    check_store(store, clears=False)
    assert other.get(KEYS[1:2], empty(1)) == 1, "engines share it"
    with pytest.raises(OSError, match="restart it"):
        store.clear()

    # A damaged run, and one that is right but must go: nobody gets them, and they are written again.
    damaged = content(4)
    store.put(KEYS[3:5], [content(3), damaged])
    broken = other._backend
    assert broken.write(KEYS[4], header_of(KEYS[4], damaged), content(5))
    assert store.get(KEYS[4:5], empty(1)) == 0 and store.counts["corrupt"] == 2
    store.remove(KEYS[3:4])
    assert store.exists(KEYS[3:4]) == 0
    third = open_lmcache(url)
    assert third.get(KEYS[3:4], empty(1)) == third.get(KEYS[4:5], empty(1)) == 0 == third.counts["corrupt"]
    assert third.put(KEYS[3:5], [content(3), content(4)]) == 2
    buffers = empty(2)
    assert store.put(KEYS[3:5], [content(3), content(4)]) == 2 and other.get(KEYS[3:5], buffers) == 2
    assert np.array_equal(buffers[0], content(3)) and np.array_equal(buffers[1], content(4))

    # An engine dies while it writes: what the server keeps of it is found damaged, and written again.
    name = f"bough@1@0@{KEYS[6]}@uint8".encode().ljust(150)
    size = HEADER.size + SIZE
    with socket.create_connection((url[5:].split(":")[0], int(url.rsplit(":", 1)[1]))) as link:
        link.sendall(struct.pack(QUESTION, PUT, size, 1, 6, 0, size, 0, 0, 0, name) + bytes(100))
    deadline = time.monotonic() + 20
    while not other.exists(KEYS[6:7]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert store.get(KEYS[6:7], empty(1)) == 0 and store.counts["corrupt"] == 3
    assert store.put(KEYS[6:7], [content(6)]) == 1 == other.get(KEYS[6:7], empty(1))

    # Several threads, as an engine has.
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            buffers = empty(1, 1 << 20)
            run = content(number, 1 << 20)
            done = store.put([KEYS[number][::-1]], [run]) and store.get([KEYS[number][::-1]], buffers)
            if not done or not np.array_equal(buffers[0], run):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    for each in (store, other, third):
        assert not each.counts["failures"]
        each.close()


def test_what_it_answers_makes_a_store(answers: Answers) -> None:
    check_server(answers.url)


def test_so_many_bytes_of_an_engine_and_no_more(answers: Answers) -> None:
    """It never makes room by itself."""
    store = open_lmcache(answers.url, max_bytes=3 * (SIZE + HEADER.size))
    assert store.put(KEYS, [content(number) for number in range(8)]) == 3
    assert store.counts["dropped"] == 5 and len(answers.values) == 3
    assert store.put(KEYS[:3], [content(number) for number in range(3)]) == 3, "they are there"
    assert open_lmcache(answers.url).max_bytes < 2**31, "a run's length is a number of 32 bits"


def test_a_server_that_hangs_up_is_a_failure_and_it_goes_on_when_it_is_there_again(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_lmcache(answers.url)
    store.put(KEYS[:1], [content(0)])
    answers.hang_up()
    assert store.get(KEYS[:1], empty(1)) == 0 and store.counts["failures"] == 1
    store._pauses.clear()
    assert store.get(KEYS[:1], empty(1)) == 1 and store.counts["failures"] == 1


def test_a_server_that_falls_silent_is_left(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_module, "TIMEOUT_S", 0.2)
    store = open_lmcache(answers.url)
    monkeypatch.setattr(Answers, "_serve", lambda *_: time.sleep(0.5))
    answers.hang_up()
    assert store.get(KEYS[:1], empty(1)) == 0
    store._pauses.clear()
    assert store.get(KEYS[:1], empty(1)) == 0 and store.counts["failures"] == 2


def test_a_server_that_is_not_there_and_a_wrong_address_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with pytest.raises(SettingsError, match=rf"lm://127.0.0.1:{port} .*lmcache_server.* or use redis, memory or file"):
        open_lmcache(f"lm://127.0.0.1:{port}")
    for url in ("redis://127.0.0.1:6379", "lm://127.0.0.1", "lm://127.0.0.1:port", "127.0.0.1:65432"):
        with pytest.raises(SettingsError, match="lmcache"):
            open_lmcache(url)


@pytest.mark.slow
def test_lmcaches_own_server_is_a_store(tmp_path: Path) -> None:
    with lmcache_server(tmp_path) as url:
        check_server(url)
