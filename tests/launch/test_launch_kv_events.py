"""Cache events as an outside subscriber sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.auth
from zmq.utils.monitor import parse_monitor_message

from bough.core.errors import SettingsError
from bough.launch import kv_events
from bough.launch.kv_events import KVEventPublisher
from bough.memory.tree.event_key import EventKey, read_key
from bough.memory.tree.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    PublisherConfig,
    is_exposed,
    parse_config,
)
from tests.fakes.scheduler_bench import Bench

BATCHES: list[list[Any]] = [
    [BlockStored((1, -2), None, (7, 8), 1), BlockRemoved((-2,))],
    [AllBlocksCleared()],
    [BlockRemoved((1,))],
]
PATIENCE_MS = 10_000  # far more than any machine needs; a test that gets that far fails


class Wire:
    """A publisher, a subscriber and somebody who asks for replays."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.config = PublisherConfig(
            endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay", topic="kv", **options
        )
        self.publisher = KVEventPublisher(self.config)

    def publish(self, *batches: list[Any]) -> None:
        for events in batches:
            for event in events:
                self.publisher.add(event)
            self.publisher.flush()

    def asker(self, key: EventKey | None = None, most_waiting: int = 0) -> zmq.Socket[bytes]:
        """Somebody who can ask for replays."""
        dealer: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, most_waiting)
        if key is not None:
            key.present(dealer)
        assert self.config.replay_endpoint is not None
        dealer.connect(self.config.replay_endpoint)
        return dealer

    def replay(self, first: int, key: EventKey | None = None) -> list[tuple[int, list[Any]]]:
        """Every batch from `first` on, as somebody who does not know our types reads it."""
        dealer = self.asker(key)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        received: list[tuple[int, list[Any]]] = []
        while dealer.poll(PATIENCE_MS):
            _, sequence, payload = dealer.recv_multipart()
            if not payload:
                assert int.from_bytes(sequence, "big", signed=True) == -1
                dealer.close()
                return received
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            received.append((int.from_bytes(sequence, "big"), batch.events))
        raise AssertionError("the replay did not end")

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path, buffer_steps=2)
    yield wire
    wire.close()


def test_what_was_missed_is_sent_again_while_the_scheduler_sleeps(wire: Wire) -> None:
    wire.publish(*BATCHES)
    assert wire.replay(0) == [(1, BATCHES[1]), (2, BATCHES[2])]  # two are kept
    assert wire.replay(2) == [(2, BATCHES[2])]
    assert wire.replay(3) == []


def test_a_turn_without_news_sends_nothing(wire: Wire) -> None:
    wire.publish(BATCHES[0], [], [], BATCHES[1])
    assert [sequence for sequence, _ in wire.replay(0)] == [0, 1]


def test_a_long_replay_has_no_holes(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    wire.publish(*([BlockRemoved((i,))] for i in range(5000)))
    assert [sequence for sequence, _ in wire.replay(0)] == list(range(5000))
    wire.close()


def test_a_message_is_topic_number_and_arrays(wire: Wire) -> None:
    subscriber = wire.context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.LINGER, 0)
    subscriber.subscribe(b"kv")
    subscriber.connect(wire.config.endpoint)
    for _ in range(1000):  # until the subscription has arrived
        wire.publish(BATCHES[0])
        if subscriber.poll(10):
            break
    topic, sequence, payload = subscriber.recv_multipart()
    assert topic == b"kv" and len(sequence) == 8
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float) and rank == 0
    assert events == [["BlockStored", [1, -2], None, [7, 8], 1, None, "GPU", ""], ["BlockRemoved", [-2], "GPU"]]


def test_an_endpoint_in_use_is_one_sentence(wire: Wire, tmp_path: Path) -> None:
    listener = wire.context.socket(zmq.PUB)
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    taken = PublisherConfig(endpoint=f"ipc://{tmp_path}/other", replay_endpoint=f"tcp://127.0.0.1:{port}")
    with pytest.raises(SettingsError, match="cannot listen on tcp"):
        KVEventPublisher(taken)


def test_the_scheduler_tells_what_it_caches() -> None:
    seen: list[Any] = []

    class Sink:
        flushes = 0

        def add(self, event: Any) -> None:
            seen.append(event)

        def flush(self) -> None:
            self.flushes += 1

    sink = Sink()
    bench = Bench(events=sink)
    bench.ask(1, [1, 2, 3], max_new_tokens=2)
    bench.run()
    stored = [e for e in seen if isinstance(e, BlockStored)]
    assert stored[0].token_ids == (1, 2, 3) and stored[0].parent_block_hash is None
    assert stored[1].parent_block_hash == stored[0].block_hashes[-1]
    assert sink.flushes > 0


# ---- who may read


class Reader:
    """A subscriber, and what becomes of its handshake."""

    def __init__(self, wire: Wire, public: bytes | None = None, secret: bytes = b"", server: bytes = b"") -> None:
        self.socket: zmq.Socket[bytes] = wire.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.subscribe(b"")
        if public is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
            self.socket.curve_serverkey = server
        self._monitor = self.socket.get_monitor_socket()
        self.socket.connect(wire.config.endpoint)

    def is_let_in(self) -> bool:
        return self._event("HANDSHAKE") == "HANDSHAKE_SUCCEEDED"

    def ends(self) -> bool:
        return self._event("DISCONNECTED") == "DISCONNECTED"

    def _event(self, beginning: str) -> str:
        while self._monitor.poll(PATIENCE_MS):
            event: str = parse_monitor_message(self._monitor.recv_multipart())["event"].name
            if event.startswith(beginning):
                return event
        raise AssertionError(f"no {beginning} of the connection")

    def close(self) -> None:
        self.socket.disable_monitor()


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    """Two key files, as ZeroMQ's tool writes them."""
    files = zmq.auth.create_certificates(tmp_path, "ours")[1], zmq.auth.create_certificates(tmp_path, "other")[1]
    for file in files:
        Path(file).chmod(0o600)
    return files


def test_only_holders_of_the_key_get_anything(tmp_path: Path, keys: tuple[str, str]) -> None:
    ours, other = read_key(keys[0]), read_key(keys[1])
    wire = Wire(tmp_path, key_file=keys[0])
    holder = Reader(wire, ours.public, ours.secret, ours.public)
    strangers = [
        Reader(wire),
        Reader(wire, other.public, other.secret, other.public),
        Reader(wire, other.public, other.secret, ours.public),  # it knows the public half
    ]
    assert holder.is_let_in() and not any(stranger.is_let_in() for stranger in strangers)
    askers = [wire.asker(), wire.asker(other)]
    for asker in askers:
        asker.send_multipart([b"", bytes(8)])
    for _ in range(1000):  # until the holder's subscription has arrived
        wire.publish(BATCHES[0])
        if holder.socket.poll(10):
            break
    assert holder.socket.recv_multipart()[0] == b"kv"
    assert wire.replay(0, ours)[0] == (0, BATCHES[0])
    assert not any(stranger.socket.poll(0) for stranger in strangers) and not any(asker.poll(0) for asker in askers)
    for reader in (holder, *strangers):
        reader.close()
    wire.close()


def test_nobody_is_let_in_where_nobody_looks_at_keys(
    tmp_path: Path, keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent:
        def stop(self) -> None: ...

    monkeypatch.setattr(kv_events, "_start_authenticator", lambda context, key: Absent())
    key = read_key(keys[0])
    wire = Wire(tmp_path, key_file=keys[0])
    reader = Reader(wire, key.public, key.secret, key.public)
    assert not reader.is_let_in()
    reader.close()
    wire.close()


def test_a_key_file_that_is_none_is_one_sentence(tmp_path: Path, keys: tuple[str, str]) -> None:
    files = {name: tmp_path / name for name in ("missing", "empty", "odd", "mixed")}
    files["empty"].touch()
    files["odd"].write_text('public-key = "short"\nsecret-key = "short"')
    ours, other = read_key(keys[0]), read_key(keys[1])
    files["mixed"].write_text(f'public-key = "{ours.public.decode()}"\nsecret-key = "{other.secret.decode()}"')
    for file in (*files.values(), keys[0].removesuffix("_secret"), tmp_path):
        with pytest.raises(SettingsError, match="The key of cache events cannot be read from") as raised:
            KVEventPublisher(PublisherConfig(endpoint=f"ipc://{tmp_path}/e", key_file=str(file)))
        assert other.secret.decode() not in str(raised.value)


def test_a_key_that_everybody_can_read_is_warned_of(keys: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    Path(keys[0]).chmod(0o644)
    for file in keys:
        read_key(file)
    (record,) = caplog.records
    assert f"chmod 600 {keys[0]}" in record.getMessage()


def test_a_key_does_not_show_in_logs(keys: tuple[str, str]) -> None:
    key = read_key(keys[0])
    assert key.secret.decode() not in repr(key)


@pytest.mark.parametrize(
    ("endpoint", "exposed"),
    [
        (PublisherConfig().endpoint, False),
        ("tcp://127.0.0.2:5557", False),
        ("tcp://[::1]:5557", False),
        ("tcp://lo:5557", False),
        ("ipc:///run/bough/events", False),
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://10.0.0.7:5557", True),
        ("tcp://eth0:5557", True),
    ],
)
def test_loopback_is_the_default_and_all_else_counts_as_exposed(endpoint: str, exposed: bool) -> None:
    assert is_exposed(endpoint) == exposed


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_open_endpoint_without_a_key_is_warned_of(
    name: str, tmp_path: Path, keys: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"endpoint": f"ipc://{tmp_path}/e", name: "tcp://*:*"}
    KVEventPublisher(PublisherConfig(**given, key_file=keys[0])).close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    KVEventPublisher(PublisherConfig(**given)).close()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "can read the tokens of all prompts" in record.getMessage() and "key_file" in record.getMessage()


# ---- what a subscriber can cause


def test_requests_that_are_none_stop_no_replays(wire: Wire) -> None:
    wire.publish(*BATCHES)
    for request in ([b""], [b"", b""], [b"x"], [b"\xff" * 99], [b"a", b"b", b"c", bytes(8)], [bytes(1 << 20)]):
        wire.asker().send_multipart(request)
    assert wire.replay(0) == [(1, BATCHES[1]), (2, BATCHES[2])]


def test_frames_that_are_too_long_end_their_connection(wire: Wire) -> None:
    reader, asker = Reader(wire), wire.asker()
    reader.socket.subscribe(bytes(5000))
    assert reader.ends()
    monitor = asker.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    asker.send_multipart([b"", bytes(1 << 20)])
    assert monitor.poll(PATIENCE_MS)
    asker.disable_monitor()
    reader.close()


def test_who_asks_and_does_not_read_holds_little(tmp_path: Path) -> None:
    steps = requests = 20
    wire = Wire(tmp_path, buffer_steps=steps)
    wire.publish(*([BlockStored((1,), None, tuple(range(10_000)), 10_000)] for _ in range(steps)))
    lazy = wire.asker(most_waiting=1)
    for _ in range(requests):
        lazy.send_multipart([b"", bytes(8)])
    for _ in range(requests):  # clients are served in turn, so all requests of the lazy one are answered by then
        assert len(wire.replay(0)) == steps
    received = 0
    while lazy.poll(100):
        lazy.recv_multipart()
        received += 1
    assert 0 < received < requests * steps / 4
    wire.close()


def test_what_is_kept_for_replays_is_bounded_in_bytes(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MOST_KEPT_BYTES", 3000)
    long = [BlockStored((1,), None, tuple(range(1000)), 1000)]
    wire.publish(long, long)
    assert [sequence for sequence, _ in wire.replay(0)] == [1]
    wire.publish(BATCHES[1], BATCHES[2])
    assert [sequence for sequence, _ in wire.replay(0)] == [2, 3]


@pytest.mark.parametrize(
    "text", ["{", '{"endpont": "x"}', '{"publisher": "nats"}', '{"hwm": 0}', '{"buffer_steps": -1}']
)
def test_a_wrong_configuration_is_one_sentence(text: str) -> None:
    with pytest.raises(SettingsError, match="kv-events-config"):
        parse_config(text)
