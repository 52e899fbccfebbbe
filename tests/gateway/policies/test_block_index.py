"""The index of a worker's cached blocks against the worker's own radix tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.gateway.policies.block_index import BlockIndex, pack
from bough.memory.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from bough.memory.tree.pool import PagePool
from bough.memory.tree.tree import RadixTree

PROMPTS = st.lists(st.integers(0, 2), max_size=12)


class Cache:
    """A worker's real cache, whose events the index follows."""

    def __init__(self, page_size: int) -> None:
        self.index = BlockIndex()
        self.size = page_size
        self.pool = PagePool(400)
        self.tree = RadixTree(page_size, on_event=self.index.apply)

    def use(self, prompt: list[int]) -> None:
        whole = prompt[: len(prompt) // self.size * self.size]
        key = np.array(whole, dtype=np.int32)
        pages = self.pool.take(len(whole) // self.size)
        self.pool.give(pages[: self.tree.insert(key, pages).existing // self.size])

    def held(self, prompt: list[int]) -> int:
        return self.tree.match(np.array(prompt, dtype=np.int32)).length


@pytest.mark.parametrize("page_size", [1, 2, 4])
@given(
    steps=st.lists(st.one_of(PROMPTS, st.integers(1, 20), st.none()), max_size=30),
    asked=st.lists(PROMPTS, min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=60)
def test_the_index_agrees_with_the_workers_tree(
    page_size: int, steps: list[list[int] | int | None], asked: list[list[int]]
) -> None:
    """Prompts come, pages are evicted, the cache is cleared; the index knows all of it from the events alone."""
    cache = Cache(page_size)
    for step in steps:
        if step is None:
            cache.pool.give(cache.tree.reset())
        elif isinstance(step, int):
            cache.pool.give(cache.tree.evict(step))
        else:
            cache.use(step)
    for prompt in asked:
        assert cache.index.match(pack(prompt)) == cache.held(prompt)
    assert len(cache.index._runs) == len(cache.tree.pages_in_use())


def follow(*events: KVEvent) -> BlockIndex:
    index = BlockIndex()
    for event in events:
        index.apply(event)
    return index


def test_blocks_of_others_are_left_out() -> None:
    index = follow(
        BlockStored((1,), None, (7,), 1, namespace="tenant"),
        BlockStored((2,), None, (7,), 1, lora_id=3),
        BlockStored((3,), None, (7,), 1, medium="CPU"),
    )
    assert index.match(pack([7])) == 0 and len(index._runs) == 0


def test_what_continues_an_unknown_block_is_ignored() -> None:
    index = follow(BlockStored((2,), 1, (8,), 1), BlockRemoved((2, 9)))
    assert len(index._runs) == 0


def test_a_block_that_is_not_full_is_ignored() -> None:
    assert len(follow(BlockStored((1,), None, (7, 8, 9), 4))._runs) == 0


def test_events_that_come_twice_change_nothing() -> None:
    stored = BlockStored((1, 2, 3), None, (7, 8, 9), 1)
    longer = BlockStored((1, 2, 3, 4), None, (7, 8, 9, 10), 1)
    index = follow(stored, stored, longer)
    assert index.match(pack([7, 8, 9, 10, 11])) == 4 and len(index._runs) == 4


def test_a_hole_in_the_middle_hides_what_follows() -> None:
    index = follow(
        BlockStored((1, 2, 3), None, (7, 8, 9), 1),
        BlockStored((4,), 3, (10,), 1),
        BlockStored((5,), 1, (11,), 1),
        BlockRemoved((2,)),
    )
    assert index.match(pack([7, 8, 9, 10])) == 1
    assert index.match(pack([7, 11])) == 2
    assert len(index._runs) == 2


def test_a_long_chain_falls_without_deep_recursion() -> None:
    events = [BlockStored((n,), n - 1 if n else None, (n % 5,), 1) for n in range(5000)]
    index = follow(*events)
    assert index.match(pack([n % 5 for n in range(6000)])) == 5000
    index.apply(BlockRemoved((0,)))
    assert len(index._runs) == 0


def test_clearing_forgets_everything() -> None:
    assert follow(BlockStored((1,), None, (7,), 1), AllBlocksCleared()).match(pack([7])) == 0
