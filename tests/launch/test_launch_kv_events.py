"""Cache events as an outside subscriber sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from bough.core.errors import SettingsError
from bough.launch.kv_events import KVEventPublisher
from bough.memory.tree import AllBlocksCleared, BlockRemoved, BlockStored
from bough.memory.tree.event_wire import KVEventBatch, PublisherConfig, parse_config
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
        self.publisher = KVEventPublisher(self.context, self.config)

    def publish(self, *batches: list[Any]) -> None:
        for events in batches:
            for event in events:
                self.publisher.add(event)
            self.publisher.flush()

    def replay(self, first: int) -> list[tuple[int, list[Any]]]:
        """Every batch from `first` on, as somebody who does not know our types reads it."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        assert self.config.replay_endpoint is not None
        dealer.connect(self.config.replay_endpoint)
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


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path, buffer_steps=2)
    yield wire
    wire.publisher.close()
    wire.context.destroy(linger=0)


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
    wire.publisher.close()
    wire.context.destroy(linger=0)


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
        KVEventPublisher(wire.context, taken)


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


@pytest.mark.parametrize("text", ["{", '{"endpont": "x"}', '{"publisher": "nats"}'])
def test_a_wrong_configuration_is_one_sentence(text: str) -> None:
    with pytest.raises(SettingsError, match="kv-events-config"):
        parse_config(text)
