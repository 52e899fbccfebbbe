"""What the tree announces: hashes that name whole prefixes, and nothing at all when nobody listens."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import pytest

from bough.core.plan import IntArray
from bough.memory.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, hash_blocks
from bough.memory.tree.tree import RadixTree


def ids(*numbers: int) -> IntArray:
    return np.array(numbers, dtype=np.int32)


def chain(*tokens: int, page_size: int = 1, namespace: str = "") -> tuple[int, ...]:
    return hash_blocks(ids(*tokens).tobytes(), 4 * page_size, None, namespace)


def test_a_hash_names_the_whole_prefix_and_the_namespace() -> None:
    assert chain(1, 2)[0] == chain(1, 3)[0]
    assert chain(1, 2)[1] != chain(3, 2)[1]
    assert chain(1, 2) != chain(1, 2, namespace="salt")
    assert len(chain(1, 2, 3, 4, page_size=2)) == 2
    first, second = chain(1, 2)
    assert hash_blocks(ids(2).tobytes(), 4, first, "") == (second,)
    assert all(-(2**63) <= h < 2**63 for h in chain(*range(100))) and min(chain(*range(100))) < 0


def test_hashes_follow_from_the_tokens_alone() -> None:
    """Spelled out once more, so that engines of different versions cannot drift apart unnoticed."""

    def mixed(token: int, place: int) -> int:
        number = (token + (place << 32) + 0x9E3779B97F4A7C15) % 2**64
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        return (number ^ number >> 27) * 0x94D049BB133111EB % 2**64

    def follow(before: int, *block: int) -> int:
        number = before * 0x9E3779B97F4A7C15 + sum(mixed(token, place) for place, token in enumerate(block))
        return (number + 2**63) % 2**64 - 2**63

    start = int.from_bytes(blake2b(b"n", digest_size=8).digest(), "big", signed=True)
    first, pair = follow(start, 1), follow(start, 1, 70_000)
    assert chain(1, 70_000, namespace="n") == (first, follow(first, 70_000))
    assert chain(1, 70_000, 3, 4, page_size=2, namespace="n") == (pair, follow(pair, 3, 4))
    assert chain(1, 2, page_size=2) != chain(2, 1, page_size=2)


def test_a_leaf_is_announced_below_its_parent() -> None:
    seen: list[KVEvent] = []
    tree = RadixTree(page_size=2, on_event=seen.append)
    hashes = chain(1, 2, 3, 4, 5, 6, page_size=2, namespace="n")
    tree.insert(ids(1, 2, 3, 4, 0), ids(1, 2), "n")
    tree.insert(ids(1, 2, 3, 4), ids(1, 2), "n")
    tree.insert(ids(1, 2, 3, 4, 5, 6), ids(1, 2, 3), "n")
    assert seen == [
        BlockStored(hashes[:2], None, (1, 2, 3, 4), 2, namespace="n"),
        BlockStored(hashes[2:], hashes[1], (5, 6), 2, namespace="n"),
    ]


def test_hashes_survive_a_split_and_a_cut() -> None:
    seen: list[KVEvent] = []
    tree = RadixTree(on_event=seen.append)
    tree.insert(ids(1, 2, 3, 4), ids(1, 2, 3, 4))
    tree.insert(ids(1, 2, 9), ids(1, 2, 5))
    assert seen[-1] == BlockStored(chain(1, 2, 9)[2:], chain(1, 2)[1], (9,), 1)
    tree.evict(1)
    assert seen[-1] == BlockRemoved(chain(1, 2, 3, 4)[3:])
    tree.evict(2)
    assert seen[-1] == BlockRemoved((chain(1, 2, 3)[2], chain(1, 2, 9)[2]))
    assert tree.check() == []


def test_reset_says_cleared_only_if_the_tree_is_empty() -> None:
    seen: list[KVEvent] = []
    tree = RadixTree(on_event=seen.append)
    node = tree.insert(ids(1), ids(1)).node
    tree.insert(ids(2), ids(2))
    tree.lock(node)
    tree.reset()
    assert seen[-1] == BlockRemoved(chain(2))
    tree.unlock(node)
    tree.reset()
    assert seen[-1] == AllBlocksCleared()


def test_no_listener_no_hashes() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2), ids(1, 2))
    assert [node.hashes for node in tree.nodes()] == [()]


@pytest.mark.parametrize(
    ("event", "on_the_wire"),
    [
        (
            BlockStored((1, -(2**63)), -5, (7, 8), 1, namespace="n"),
            ["BlockStored", [1, -(2**63)], -5, [7, 8], 1, None, "GPU", "n"],
        ),
        (BlockStored((1,), None, (7,), 1), ["BlockStored", [1], None, [7], 1, None, "GPU", ""]),
        (BlockRemoved((3,)), ["BlockRemoved", [3], "GPU"]),
        (AllBlocksCleared(), ["AllBlocksCleared"]),
    ],
)
def test_an_event_on_the_wire_is_an_array_that_begins_with_its_name(event: KVEvent, on_the_wire: list[Any]) -> None:
    encoded = msgspec.msgpack.encode(event)
    assert msgspec.msgpack.decode(encoded) == on_the_wire
    assert msgspec.msgpack.decode(encoded, type=KVEvent) == event
