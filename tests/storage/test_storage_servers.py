"""Stores behind servers: `bough store`, and Redis where it is installed."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from bough.cli.main import main
from bough.core.errors import SettingsError
from bough.messages.channels import KEY_VARIABLE
from bough.storage import memory as memory_module
from bough.storage.backends import open_store
from bough.storage.memory import Memory, MemoryServer
from bough.storage.store import Store
from tests.storage.store_checks import KEYS, SIZE, check_store, content, empty

KEY = "k" * 32


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Starts servers in threads, which end with their context."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(memory_module, "TIMEOUT_MS", 10_000)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    threads = []

    def start(max_bytes: int = 100 * SIZE, url: str = "") -> str:
        url = url or f"tcp://127.0.0.1:{free_port()}"
        server = MemoryServer(url, max_bytes)

        def run() -> None:
            with pytest.raises(zmq.ContextTerminated):
                server.serve()
            server._socket.close(linger=0)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return url

    yield start
    context.term()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def opened() -> Iterator[Callable[[str], Store]]:
    stores: list[Store] = []

    def start(url: str) -> Store:
        stores.append(Store(Memory(url)))
        return stores[-1]

    yield start
    for store in stores:
        store.close()


def test_a_server_in_memory_is_a_store(serve: Callable[..., str], opened: Callable[[str], Store]) -> None:
    check_store(opened(serve()))


def test_a_unix_socket_needs_no_key(
    serve: Callable[..., str], opened: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    check_store(opened(serve(url=f"ipc://{tmp_path}/store.sock")))


def test_engines_share_a_server(serve: Callable[..., str], opened: Callable[[str], Store]) -> None:
    url = serve()
    first, second = opened(url), opened(url)
    first.put(KEYS[:2], [content(0), content(1)])
    buffers = empty(2)
    assert second.get(KEYS[:2], buffers) == 2 and np.array_equal(buffers[1], content(1))


def test_the_server_keeps_what_was_used_last(serve: Callable[..., str], opened: Callable[[str], Store]) -> None:
    store = opened(serve(3 * SIZE))
    store.put(KEYS[:3], [content(number) for number in range(3)])
    store.get(KEYS[:1], empty(1))
    assert store.put(KEYS[3:4], [content(3)]) == 1
    assert [store.get([key], empty(1)) for key in KEYS[:4]] == [1, 0, 1, 1]
    assert store.put(KEYS[4:5], [content(4, 4 * SIZE)]) == 0, "which has no room at all"
    assert [store.get([key], empty(1)) for key in KEYS[:5]] == [1, 0, 1, 1, 0] and store.counts["failures"] == 0


def test_several_threads_may_ask_at_once(serve: Callable[..., str], opened: Callable[[str], Store]) -> None:
    store = opened(serve())
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            buffers = empty(1)
            done = store.put([KEYS[number]], [content(number)]) and store.get([KEYS[number]], buffers)
            if not done or not np.array_equal(buffers[0], content(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not store.counts["failures"]


@pytest.mark.parametrize("key", ["x" * 32, None])
def test_without_the_key_there_is_no_answer(
    serve: Callable[..., str],
    opened: Callable[[str], Store],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    key: str | None,
) -> None:
    url = serve()
    monkeypatch.setattr(memory_module, "TIMEOUT_MS", 300)
    if key is None:
        monkeypatch.setattr(memory_module, "use_key", lambda *_, **__: None)
    else:
        monkeypatch.setenv(KEY_VARIABLE, key)
    store = opened(url)
    assert store.put(KEYS[:1], [content(0)]) == 0 and store.get(KEYS[:1], empty(1)) == 0
    assert store.counts["failures"] == 2 and KEY_VARIABLE in caplog.text


def test_a_late_answer_is_not_taken_for_another(
    opened: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(memory_module, "TIMEOUT_MS", 300)
    url = f"tcp://127.0.0.1:{free_port()}"
    store = opened(url)
    assert store.get(KEYS[:1], empty(1)) == 0, "nobody listens yet"
    server = MemoryServer(url, 10 * SIZE)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            if server._socket.poll(20):
                operation, *frames = server._socket.recv_multipart(copy=False)
                server._socket.send_multipart(server.answer(operation.bytes, frames), copy=False)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert store.put(KEYS[:1], [content(0)]) == 1
        store._pauses.clear()
        assert store.get(KEYS[:1], empty(1)) == 1
    finally:
        stop.set()
        thread.join(10)
        server._socket.close(linger=0)


def test_both_ends_need_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=KEY_VARIABLE):
        open_store("memory")
    assert main(["store", "--port", "0"]) == 2 and KEY_VARIABLE in capsys.readouterr().err


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["store", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(
    monkeypatch: pytest.MonkeyPatch, opened: Callable[[str], Store]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(memory_module, "TIMEOUT_MS", 20_000)  # until it listens
    port = free_port()
    command = [sys.executable, "-m", "bough.cli.main", "store", "--port", str(port), "--max-bytes", str(10 * SIZE)]
    server = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        check_store(opened(f"tcp://127.0.0.1:{port}"))
    finally:
        server.send_signal(signal.SIGTERM)
    assert server.wait(10) == 143


# ---- configuration


@pytest.mark.parametrize(
    ("backend", "text", "said"),
    [
        ("file", "{", "JSON"),
        ("file", "[]", "object"),
        ("file", '{"maxbytes": 5}', r"max_bytes \(int\)"),
        ("file", '{"max_bytes": "5"}', r"max_bytes \(int\)"),
        ("memory", '{"max_bytes": 5}', r"url \(str\)"),
        ("memory", '{"url": "nowhere"}', "memory"),
        ("file", "@/does/not/exist", "/does/not/exist"),
    ],
)
def test_an_extra_configuration_that_cannot_be_used(
    backend: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(SettingsError, match=said):
        open_store(backend, text)


@pytest.mark.parametrize("text", ['{"max_bytes": 12345}', "max_bytes: 12345"])
def test_an_extra_configuration_in_a_file(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path))
    (tmp_path / "extra").write_text(text)
    store = open_store("file", f"@{tmp_path}/extra")
    assert store.put(KEYS[:1], [content(0, 20_000)]) == 0 and store.put(KEYS[:1], [content(0)]) == 1


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(SettingsError, match=r"bough\[redis\]"):
        open_store("redis")


# ---- Redis


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis")
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on this machine")
    port, folder = free_port(), tmp_path_factory.mktemp("redis")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen([*command, "--requirepass", "secret"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.02)
    yield f"redis://:secret@127.0.0.1:{port}/1"
    server.terminate()
    server.wait(10)


def open_redis(url: str) -> Store:
    return open_store("redis", f'{{"url": "{url}"}}')


@pytest.mark.slow
def test_redis_is_a_store_and_keeps_what_others_have_there(redis_url: str) -> None:
    import redis

    client = redis.Redis.from_url(redis_url)
    client.set("others", b"value")
    store = open_redis(redis_url)
    check_store(store)
    assert client.keys() == [b"others"]
    store.close()


@pytest.mark.slow
def test_a_value_that_somebody_changed_in_redis_is_removed(redis_url: str) -> None:
    import redis

    client, store = redis.Redis.from_url(redis_url), open_redis(redis_url)
    store.put(KEYS[:1], [content(0)])
    client.setrange(f"bough:{KEYS[0]}", 500, b"changed")
    assert store.get(KEYS[:1], empty(1)) == 0 and store.counts["corrupt"] == 1
    assert not client.exists(f"bough:{KEYS[0]}")


@pytest.mark.slow
def test_a_full_redis_drops_runs_and_can_be_read(redis_url: str) -> None:
    import redis

    client, store = redis.Redis.from_url(redis_url), open_redis(redis_url)
    store.put(KEYS[:1], [content(0)])
    client.config_set("maxmemory", 1)
    try:
        assert store.put(KEYS[1:2], [content(1)]) == 0 and store.counts["failures"] == 1
        assert store.get(KEYS[:1], empty(1)) == 1
    finally:
        client.config_set("maxmemory", 0)


@pytest.mark.slow
@pytest.mark.parametrize("url", ["redis://:wrong@127.0.0.1:{port}", "redis://127.0.0.1:1"])
def test_a_redis_that_cannot_be_used_has_nothing(redis_url: str, url: str) -> None:
    port = redis_url.rpartition(":")[2].partition("/")[0]
    store = open_redis(url.format(port=port))
    assert store.get(KEYS[:1], empty(1)) == 0 and store.put(KEYS[:1], [content(0)]) == 0
    assert store.counts["failures"] == 2
