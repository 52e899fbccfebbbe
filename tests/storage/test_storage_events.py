"""What subscribers of cache events hear of stores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.control import SwapWeights
from bough.core.model_config import KVGroup
from bough.memory.tree.events import DEVICE, DISK, EXTERNAL, HOST, AllBlocksCleared, BlockRemoved, KVEvent
from bough.messages.requests import Control, FlushCache
from bough.scheduler import store_events as events_module
from bough.scheduler.store_events import StoreEvents
from bough.storage import tier as tier_module
from bough.storage.files import FOLDER_VARIABLES, Files
from bough.storage.store import HEADER, run_keys
from tests.storage.test_storage_servers import open_redis, opened, redis_url, serve
from tests.storage.test_storage_store import Kept
from tests.storage.test_storage_tier import PROMPT, Rig, SlowThread, without_store

__all__ = ["opened", "redis_url", "serve"]


class Subscriber:
    """Knows what lies where, and that each event follows from those before it."""

    def __init__(self) -> None:
        self.held: dict[str | None, dict[int, tuple[int, ...]]] = {}  # by medium: blocks with their tokens
        self.counts: Counter[tuple[str, str | None]] = Counter()  # of blocks
        self.flushed = 0

    def add(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held[DEVICE] = {}
            return
        self.counts[type(event).__name__, event.medium] += len(event.block_hashes)
        held = self.held.setdefault(event.medium, {})
        if isinstance(event, BlockRemoved):
            assert held.keys() >= {*event.block_hashes}
            self.held[event.medium] = {block: of for block, of in held.items() if block not in event.block_hashes}
        else:
            assert event.parent_block_hash is None or event.parent_block_hash in held
            assert not held.keys() & {*event.block_hashes}
            tokens = np.array(event.token_ids).reshape(len(event.block_hashes), event.block_size).tolist()
            held.update(zip(event.block_hashes, map(tuple, tokens), strict=True))

    def flush(self) -> None:
        self.flushed += 1

    def tokens(self, medium: str) -> list[int]:
        """In the order in which they were announced."""
        return [token for block in self.held.get(medium, {}).values() for token in block]


@pytest.fixture(autouse=True)
def changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "in_daemon_thread", SlowThread().submit)


@pytest.fixture
def heard() -> Subscriber:
    return Subscriber()


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("groups", [[], [(KVGroup("window", 6), 300)], [(KVGroup("state"), 16)]])
def test_what_is_written_is_announced_with_the_hashes_of_the_other_tiers(
    heard: Subscriber, page_size: int, groups: list[Any]
) -> None:
    Rig(Kept(), page_size=page_size, groups=groups, events=heard).ask(namespace="salt")
    assert heard.tokens(DISK) == PROMPT[:512]
    for medium in (DEVICE, HOST):
        assert heard.held[DISK].items() <= heard.held[medium].items()
    assert EXTERNAL not in heard.held


@pytest.mark.parametrize(("backend", "medium"), [("file", DISK), ("memory", EXTERNAL), ("redis", EXTERNAL)])
def test_what_is_read_is_announced_as_well(heard: Subscriber, backend: str, medium: str) -> None:
    kept = Kept()
    Rig(kept).ask()
    rig = Rig(kept, events=heard, backend=backend)
    assert not heard.held, "it does not know yet what the store has"
    assert rig.ask() == (512, (512, backend)) and heard.tokens(medium) == PROMPT[:512]
    for _ in range(3):
        rig.flush()
        rig.ask()
    assert heard.counts["BlockStored", medium] == 512 and not heard.counts["BlockRemoved", medium], "once"


def test_the_rest_of_a_prefix_is_announced_behind_it(heard: Subscriber) -> None:
    kept = Kept()
    Rig(kept).ask()
    rig = Rig(kept, events=heard)
    rig.ask(PROMPT[:300])
    assert heard.tokens(DISK) == PROMPT[:256]
    rig.ask()
    assert heard.tokens(DISK) == PROMPT[:512]


def test_prompts_that_part_within_a_run_are_both_announced(heard: Subscriber) -> None:
    """As with a common system prompt: its blocks stay as long as one of the runs is there."""
    kept = Kept()
    rig = Rig(kept, events=heard)
    other = [*PROMPT[:100], *([3] * 500)]
    rig.ask()
    first = [*kept.values]
    rig.ask(other)
    assert sorted(heard.tokens(DISK)) == sorted(PROMPT[:512] + other[100:512])
    for keys, left in ((first, other[:512]), ([key for key in kept.values if key not in first], [])):
        for key in keys:
            rig.transfers.store._backend.remove(key)
        rig.bench.turn()
        assert sorted(heard.tokens(DISK)) == sorted(left)


def test_an_engine_that_falls_asleep_has_told_what_was_written(heard: Subscriber) -> None:
    rig = Rig(Kept(), writes=20, events=heard)
    rig.ask()
    assert heard.tokens(DISK) == PROMPT[:512] and not rig.tier.busy


def test_a_damaged_run_is_withdrawn_and_announced_again(heard: Subscriber) -> None:
    """With what is behind it, which nobody finds without it."""
    kept = Kept()
    rig = Rig(kept, events=heard)
    rig.ask()
    key, value = next(iter(kept.values.items()))
    kept.values[key] = value[:-1] + bytes([value[-1] ^ 1])
    rig.flush()
    assert rig.ask() == (0, None)
    assert heard.counts["BlockRemoved", DISK] == 512 and heard.tokens(DISK) == PROMPT[:512]


def test_what_another_engine_removes_is_withdrawn_when_it_is_missed(heard: Subscriber) -> None:
    kept = Kept()
    rig = Rig(kept, events=heard)
    rig.ask()
    last = [*kept.values][1]
    del kept.values[last]
    rig.flush()
    rig.bench.turn(5)
    assert heard.tokens(DISK) == PROMPT[:512], "nobody has told this engine"
    rig.bench.executor.order.clear()
    assert rig.ask() == (256, (256, "file")) and heard.counts["BlockRemoved", DISK] == 256
    assert last in kept.values and heard.tokens(DISK) == PROMPT[:512]


def test_a_store_that_fails_withdraws_nothing(heard: Subscriber) -> None:
    kept = Kept()
    rig = Rig(kept, events=heard)
    rig.ask()
    kept.broken = True
    rig.flush()
    assert rig.ask() == (0, None) and rig.figures["failures_total"] == 2, "a read and a write"
    rig.ask([5, *PROMPT])
    assert heard.tokens(DISK) == PROMPT[:512] and not heard.counts["BlockRemoved", DISK]


def test_a_poisoned_prefix_is_withdrawn(heard: Subscriber) -> None:
    rig = Rig(Kept(), events=heard)
    rig.ask()
    rig.bench.executor.poisoned_rows.update(range(8))
    rig.bench.ask(1, [*PROMPT, 7], max_new_tokens=2)
    rig.bench.run()
    assert not heard.tokens(DISK)


@pytest.mark.parametrize("change", ["clear", "detach", "weights"])
def test_what_this_engine_finds_no_more_is_withdrawn(heard: Subscriber, change: str) -> None:
    kept = Kept()
    rig = Rig(kept, events=heard, writes=1000)
    rig.bench.ask(0, PROMPT, max_new_tokens=2)
    rig.bench.turn(60)
    swap = Control(call=1, command=SwapWeights("b"), wait=True, flush_cache=True, facts={"model_path": "b"})
    if change == "weights":
        rig.bench.submit(swap)
        rig.bench.run()
    else:
        assert rig.change(change).ok
    rig.bench.run()
    assert not heard.tokens(DISK), "nor what was still being written"
    assert heard.counts["BlockStored", DISK] == heard.counts["BlockRemoved", DISK]


def test_after_the_weights_have_changed_their_runs_are_announced(heard: Subscriber) -> None:
    rig = Rig(Kept(), events=heard)
    rig.ask()
    rig.bench.submit(Control(call=1, command=SwapWeights("b"), wait=True, flush_cache=True, facts={"model_path": "b"}))
    rig.bench.run()
    assert not heard.tokens(DISK)
    rig.ask(weights="b")
    assert heard.tokens(DISK) == PROMPT[:512] and heard.counts["BlockRemoved", DISK] == 512


def test_a_store_that_comes_announces_what_is_stored_there(heard: Subscriber) -> None:
    kept = Kept()
    rig = without_store(kept, events=heard)
    rig.ask()
    assert DISK not in heard.held
    rig.change("attach", storage_backend="redis")
    rig.ask([*PROMPT, 7])
    assert heard.tokens(EXTERNAL) == PROMPT[:512]
    rig.change("attach", storage_backend="redis", write_policy="write_back")
    assert heard.tokens(EXTERNAL) == PROMPT[:512], "other policies remove nothing"
    rig.change("detach")
    assert not heard.tokens(EXTERNAL)


def test_flushing_the_cache_leaves_the_store(heard: Subscriber) -> None:
    rig = Rig(Kept(), events=heard)
    rig.ask()
    rig.bench.submit(FlushCache(0))
    rig.bench.run()
    assert not heard.held[DEVICE] and not heard.held[HOST] and heard.tokens(DISK) == PROMPT[:512]


def test_without_subscribers_the_store_is_not_watched() -> None:
    kept = Kept()
    rig = Rig(kept)
    rig.ask()
    events = rig.tier._events
    assert not events.on and not events.seen and not events._runs
    assert "exists" not in vars(kept) and "_read" not in vars(rig.transfers.store)


def test_more_than_an_engine_remembers_is_given_up(heard: Subscriber, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MOST_BLOCKS", 2048)
    rig = Rig(Kept(), events=heard, pages=4096)
    for first in range(8):
        rig.ask([first, *PROMPT])
        assert len(heard.tokens(DISK)) <= 2048
    events = rig.tier._events
    assert len(heard.tokens(DISK)) == 2048 == 256 * len(events._runs)
    assert heard.counts["BlockStored", DISK] == 16 * 256
    assert heard.tokens(DISK)[-512:] == [7, *PROMPT][:512], "the first ones are given up"


def known(rig: Rig, tokens: Any, namespace: str) -> bool:
    return rig.tier._events._tree.match_length(tokens, namespace) == len(tokens)


SEEN = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=4, max_size=16), st.integers(1, 4), st.booleans()))


@settings(deadline=None, max_examples=200)
@given(SEEN, st.sampled_from([1, 2, 4]))
def test_a_block_is_announced_while_a_run_with_it_is_there(seen: list[Any], page_size: int) -> None:
    """Runs of 4 tokens share their first blocks. The model: a run comes behind those before it, and goes with all
    behind it."""
    subscriber = Subscriber()
    there: set[tuple[int, ...]] = set()
    events = StoreEvents(subscriber.add, "file", 4, page_size)
    for prompt, count, found in seen:
        tokens = prompt[: min(count, len(prompt) // 4) * 4]
        keys = ["".join(map(str, tokens[:end])) for end in range(4, len(tokens) + 1, 4)]
        events.describe(keys, np.array(tokens, dtype=np.int32), "")
        events.seen.append((keys[-1], found))
        events.tell()
        if not found:
            there = {run for run in there if list(run[: len(tokens)]) != tokens}
        elif len(tokens) == 4 or tuple(tokens[:-4]) in there:
            there.add(tuple(tokens))
        blocks = {run[:end] for run in there for end in range(page_size, len(run) + 1, page_size)}
        assert len(subscriber.held.get(DISK, {})) == len(blocks)
        assert sorted(subscriber.tokens(DISK)) == sorted(token for block in blocks for token in block[-page_size:])


def test_what_many_prompts_begin_with_is_remembered_once(heard: Subscriber) -> None:
    events = StoreEvents(heard.add, "file", 4, 1)
    for last in range(50):
        tokens = np.array([*range(400), last, last, last, last], dtype=np.int32)
        keys = [f"{number}" for number in range(100)] + [f"last {last}"]
        events.describe(keys, tokens, "")
        assert events.prefix(keys[-1])[0].tolist() == tokens.tolist()
    assert sum((own if own.base is None else own.base).nbytes for _, own, _ in events._runs.values()) == 150 * 16


# ---- stores


def test_a_folder_that_makes_room_withdraws_what_it_removes(
    heard: Subscriber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLES[0], str(tmp_path / "kv"))
    size = HEADER.size + Rig(Kept()).tier.run_bytes
    rig = Rig(Files(max_bytes=5 * size), events=heard)
    for first in range(6):
        rig.ask([first, *PROMPT])
        there = {path.name for path in (tmp_path / "kv").iterdir() if not path.name.startswith(".")}
        runs = (rig.tier._events.prefix(key) for key in there)
        announced = [run for run in runs if len(run[0]) and known(rig, *run)]
        assert len(there) <= 5 and len(heard.tokens(DISK)) == 256 * len(announced) >= 512
    assert heard.counts["BlockRemoved", DISK] >= 256 * 4


def test_what_a_server_has_pushed_out_is_withdrawn_when_it_is_missed(
    heard: Subscriber, serve: Any, opened: Any
) -> None:
    run_bytes = Rig(Kept()).tier.run_bytes
    url = serve(3 * run_bytes)
    rig = Rig(opened(url)._backend, events=heard, backend="memory")
    other = Rig(opened(url)._backend, backend="memory")
    rig.ask()
    other.ask([5, *PROMPT])
    assert heard.tokens(EXTERNAL) == PROMPT[:512], "of which the other's have pushed out one"
    rig.flush()
    assert rig.ask() == (0, None)
    assert heard.counts["BlockRemoved", EXTERNAL] == 512 and heard.tokens(EXTERNAL) == PROMPT[:512]


@pytest.mark.slow
def test_redis(heard: Subscriber, redis_url: str) -> None:
    import redis

    client = redis.Redis.from_url(redis_url)
    rig = Rig(open_redis(redis_url)._backend, events=heard, backend="redis")
    rig.ask()
    assert heard.tokens(EXTERNAL) == PROMPT[:512]
    key = run_keys((*rig.tier._identity, ""), np.array(PROMPT))[0]
    client.setrange(f"bough:{key}", 500, b"changed")
    rig.flush()
    assert rig.ask() == (0, None)
    assert heard.counts["BlockRemoved", EXTERNAL] == 512 and heard.tokens(EXTERNAL) == PROMPT[:512]
    rig.flush(storage=True)
    assert not heard.tokens(EXTERNAL)
