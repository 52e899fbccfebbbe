"""Cache events as an outside subscriber sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from bough.core.errors import SettingsError
from bough.launch.kv_events import KVEventBatch, KVEventPublisher, PublisherConfig, parse_config
from bough.memory.tree import AllBlocksCleared, BlockRemoved, BlockStored
from tests.fakes.scheduler_bench import Bench


def test_batches_are_numbered_and_can_be_asked_for_again(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    config = PublisherConfig(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=f"ipc://{tmp_path}/replay", topic="kv")
    publisher = KVEventPublisher(context, config)
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.LINGER, 0)
    subscriber.subscribe(b"kv")
    subscriber.connect(config.endpoint)
    batches: list[list[Any]] = [
        [BlockStored((1, 2), None, (7, 8), 1), BlockRemoved((2,))],
        [AllBlocksCleared()],
    ]
    # A subscriber that has just connected may miss the first messages; the replay is there for that.
    for events in batches:
        for event in events:
            publisher.add(event)
        publisher.flush()
    publisher.flush()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(config.replay_endpoint)
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    received: list[tuple[int, list[Any]]] = []
    for _ in range(200):
        publisher.flush()
        while dealer.poll(10):
            _, sequence, payload = dealer.recv_multipart()
            if not payload:
                break
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            received.append((int.from_bytes(sequence, "big"), batch.events))
        if len(received) == 2:
            break
    assert received == [(0, batches[0]), (1, batches[1])]
    context.destroy(linger=0)


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
