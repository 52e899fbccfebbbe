"""Following the events of real publishers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq.auth

from bough.gateway import kv_feed
from bough.gateway.kv_feed import KVFeed, reachable
from bough.gateway.policies.block_index import BlockIndex, pack
from bough.launch.kv_events import KVEventPublisher
from bough.memory.tree.event_key import read_key
from bough.memory.tree.events import BlockStored, KVEvent, parse_config

PATIENCE_S = 10.0


class Watcher:
    """An observer that keeps the indexes and counts the fresh starts."""

    def __init__(self) -> None:
        self.indexes: dict[str, BlockIndex] = {}
        self.restarts = 0

    def observe(self, worker_id: str, event: KVEvent) -> None:
        self.indexes[worker_id].apply(event)

    def restart(self, worker_id: str) -> None:
        self.restarts += 1
        self.indexes[worker_id] = BlockIndex()

    def unobserved(self, worker_id: str) -> None:
        self.indexes.pop(worker_id, None)

    def held(self, *ids: int) -> int:
        return self.indexes["w"].match(pack(ids)) if "w" in self.indexes else 0


class Worker:
    """A publisher as the engine has it, with one block per token."""

    def __init__(self, folder: Path, replay: bool, **options: Any) -> None:
        config: dict[str, Any] = {"endpoint": f"ipc://{folder}/events", **options}
        if replay:
            config["replay_endpoint"] = f"ipc://{folder}/replays"
        self.config = json.dumps(config)
        self._config = parse_config(self.config)
        self.publisher = KVEventPublisher(self._config)

    def store(self, *tokens: int, below: int | None = None) -> None:
        self.publisher.add(BlockStored(tokens, below, tokens, 1))
        self.publisher.flush()

    def restart(self) -> None:
        self.publisher.close()
        self.publisher = KVEventPublisher(self._config)

    def close(self) -> None:
        self.publisher.close()


async def until(met: Callable[[], bool], nudge: Callable[[], None] = lambda: None) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():
            nudge()
            await asyncio.sleep(0.01)


def run(
    folder: Path,
    replay: bool,
    story: Callable[[Worker, Watcher, KVFeed], Any],
    held_key: str | None = None,
    **options: Any,
) -> None:
    """`held_key` is the file that the gateway has; `options` are the worker's."""

    async def play() -> None:
        feed = KVFeed(None if held_key is None else read_key(held_key))
        worker, watcher = Worker(folder, replay, **options), Watcher()
        try:
            await story(worker, watcher, feed)
        finally:
            await feed.close()
            worker.close()

    asyncio.run(play())


def test_a_late_subscriber_fetches_what_it_missed(tmp_path: Path) -> None:
    async def story(worker: Worker, watcher: Watcher, feed: KVFeed) -> None:
        worker.store(1, 2)
        worker.store(3, below=2)
        assert feed.follow("w", "http://here:1", worker.config, watcher)
        await until(lambda: watcher.held(1, 2, 3) == 3)
        # Told again until it is heard: the replay may be there before the subscription is.
        await until(lambda: watcher.held(1, 2, 3, 4) == 4, lambda: worker.store(4, below=3))
        assert watcher.restarts == 1

    run(tmp_path, True, story)


def test_replays_that_reach_back_only_so_far_are_taken_from_there(tmp_path: Path) -> None:
    async def story(worker: Worker, watcher: Watcher, feed: KVFeed) -> None:
        for token in (1, 2, 3, 4, 5):
            worker.store(token)
        feed.follow("w", "http://here:1", worker.config, watcher)
        await until(lambda: watcher.held(5) == 1)
        assert (watcher.held(3), watcher.held(4)) == (0, 1)

    run(tmp_path, True, story, buffer_steps=2)


def test_without_replays_what_was_missed_stays_unknown(tmp_path: Path) -> None:
    async def story(worker: Worker, watcher: Watcher, feed: KVFeed) -> None:
        worker.store(1, 2)
        feed.follow("w", "http://here:1", worker.config, watcher)
        await until(lambda: watcher.held(7) == 1, lambda: worker.store(7))
        assert watcher.held(1, 2) == 0

    run(tmp_path, False, story)


@pytest.mark.parametrize("replay", [True, False])
def test_a_worker_that_restarts_has_an_empty_cache(tmp_path: Path, replay: bool) -> None:
    async def story(worker: Worker, watcher: Watcher, feed: KVFeed) -> None:
        feed.follow("w", "http://here:1", worker.config, watcher)
        await until(lambda: watcher.held(1) == 1, lambda: worker.store(1))
        worker.restart()
        await until(lambda: watcher.held(1) == 0 and watcher.held(5) == 1, lambda: worker.store(5))

    run(tmp_path, replay, story)


def test_a_worker_that_publishes_nothing_is_not_followed(tmp_path: Path) -> None:
    async def story(worker: Worker, watcher: Watcher, feed: KVFeed) -> None:
        assert not feed.follow("w", "http://here:1", None, watcher)
        assert not feed.follow("w", "http://here:1", '{"publisher": "kafka"}', watcher)
        assert feed.follow("w", "http://here:1", worker.config, watcher)
        await until(lambda: "w" in watcher.indexes)
        assert feed.follows("w", watcher)
        feed.unfollow("w", watcher)
        assert watcher.indexes == {}

    run(tmp_path, False, story)


@pytest.fixture
def key_files(tmp_path: Path) -> tuple[str, str]:
    return zmq.auth.create_certificates(tmp_path, "ours")[1], zmq.auth.create_certificates(tmp_path, "other")[1]


@pytest.mark.parametrize("needed", [True, False])
def test_a_gateway_with_the_key_follows_workers_with_and_without_one(
    tmp_path: Path, key_files: tuple[str, str], needed: bool
) -> None:
    async def story(worker: Worker, watcher: Watcher, feed: KVFeed) -> None:
        worker.store(1, 2)
        assert feed.follow("w", "http://here:1", worker.config, watcher)
        await until(lambda: watcher.held(1, 2) == 2)
        await until(lambda: watcher.held(7) == 1, lambda: worker.store(7))

    run(tmp_path, True, story, held_key=key_files[0], **({"key_file": key_files[0]} if needed else {}))


def test_a_gateway_without_the_key_says_what_is_missing(
    tmp_path: Path, key_files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(worker: Worker, watcher: Watcher, feed: KVFeed) -> None:
        assert not feed.follow("w", "http://here:1", worker.config, watcher)
        assert "--kv-events-key-file" in caplog.text

    run(tmp_path, True, story, key_file=key_files[0])


def test_a_wrong_key_gets_nothing_is_told_once_and_tried_again_in_peace(
    tmp_path: Path, key_files: tuple[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def story(worker: Worker, watcher: Watcher, feed: KVFeed) -> None:
        sleep = asyncio.sleep

        async def counted(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        worker.store(1, 2)
        assert feed.follow("w", "http://here:1", worker.config, watcher)
        monkeypatch.setattr(kv_feed.asyncio, "sleep", counted)
        async with asyncio.timeout(PATIENCE_S):
            while pauses.count(kv_feed.RECONNECT_PAUSE_S) < 3:
                worker.store(3)
                await sleep(0.01)
        assert watcher.held(1) == watcher.held(3) == 0
        assert caplog.text.count("refuses to send its cache events") == 1

    run(tmp_path, True, story, held_key=key_files[1], key_file=key_files[0])


@pytest.mark.parametrize(
    ("endpoint", "url", "reached"),
    [
        ("tcp://*:5557", "http://10.0.0.7:30000", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "http://[fe80::1]:30000/", "tcp://[fe80::1]:5557"),
        ("tcp://events:9", "http://10.0.0.7:30000", "tcp://events:9"),
        ("ipc:///tmp/x", "http://10.0.0.7:30000", "ipc:///tmp/x"),
    ],
)
def test_a_wildcard_means_the_workers_host(endpoint: str, url: str, reached: str) -> None:
    assert reachable(endpoint, url) == reached
