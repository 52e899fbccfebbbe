"""Each eviction policy as a table, and the queue that serves them all."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.plan import IntArray
from bough.core.settings import EVICTION_POLICIES
from bough.memory.tree.eviction import POLICIES
from bough.memory.tree.node import Node
from bough.memory.tree.tree import RadixTree


def leaf(*, created: int = 0, last_used: int = 0, hits: int = 0, priority: int = 0) -> Node:
    none = tokens()
    return Node(None, b"", b"", none, (), (), created=created, last_used=last_used, hits=hits, priority=priority)


def tokens(*numbers: int) -> IntArray:
    return np.array(numbers, dtype=np.int32)


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        ("lru", leaf(last_used=1, hits=9), leaf(last_used=2)),
        ("lfu", leaf(hits=1, last_used=9), leaf(hits=2, last_used=1)),
        ("lfu", leaf(hits=1, last_used=1), leaf(hits=1, last_used=2)),
        ("slru", leaf(hits=1, last_used=9), leaf(hits=2, last_used=1)),
        ("slru", leaf(hits=1, last_used=1), leaf(hits=0, last_used=2)),
        ("slru", leaf(hits=7, last_used=1), leaf(hits=2, last_used=2)),
        ("fifo", leaf(created=1, last_used=9), leaf(created=2, last_used=3)),
        ("mru", leaf(last_used=2), leaf(last_used=1)),
        ("priority", leaf(priority=-1, last_used=9), leaf(priority=0, last_used=1)),
        ("priority", leaf(priority=3, last_used=1), leaf(priority=3, last_used=2)),
    ],
)
def test_policy_ranks_the_first_leaf_before_the_second(policy: str, first: Node, second: Node) -> None:
    rank = POLICIES[policy]
    assert rank(first) < rank(second)


def test_every_policy_of_the_flag_is_there() -> None:
    assert tuple(POLICIES) == EVICTION_POLICIES


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [2, 3, 1]),  # 1 is used last
        ("mru", [1, 3, 2]),
        ("fifo", [1, 2, 3]),
        ("lfu", [3, 2, 1]),  # 3 was never hit, 2 once, 1 three times
        ("slru", [2, 3, 1]),  # only 1 has reached the protected segment
        ("priority", [2, 1, 3]),
    ],
)
def test_victims_leave_the_tree_in_the_policys_order(policy: str, order: list[int]) -> None:
    tree = RadixTree(policy=policy)
    for token, priority in ((1, 5), (2, 0), (3, 9)):
        tree.insert(tokens(token), tokens(token), priority=priority)
    tree.match(tokens(1))
    tree.match(tokens(2))
    tree.insert(tokens(3), tokens(3))  # recent, but no hit
    tree.match(tokens(1))
    tree.match(tokens(1))
    assert [tree.evict(1).tolist()[0] for _ in order] == order


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_changes_after_ranking_counts(policy: str) -> None:
    """The first eviction ranks all leaves; uses after it must still move them."""
    tree = RadixTree(policy=policy)
    for token in (9, 1, 2):
        tree.insert(tokens(token), tokens(token))
    tree.evict(1)
    if policy == "mru":  # 2 went; of 9 and 1, the one used now goes next
        tree.match(tokens(9))
        assert tree.evict(1).tolist() == [9]
        return
    tree.match(tokens(1))
    tree.match(tokens(1))
    tree.insert(tokens(1), tokens(1), priority=1)
    expected = [1] if policy == "fifo" else [2]
    assert tree.evict(1).tolist() == expected


def test_raised_priority_protects_a_shared_prefix() -> None:
    tree = RadixTree(policy="priority")
    tree.insert(tokens(1), tokens(1), priority=1)
    tree.insert(tokens(2), tokens(2), priority=2)
    tree.insert(tokens(1), tokens(1), priority=3)
    tree.insert(tokens(1), tokens(1), priority=0)  # a lower one takes nothing away
    assert tree.evict(1).tolist() == [2]


def test_many_leaves_go_in_the_order_of_their_use() -> None:
    tree = RadixTree()
    for token in range(1, 1_001):
        tree.insert(tokens(token), tokens(token))
    assert tree.check() == []
    assert tree.evict(1_000).tolist() == list(range(1, 1_001))


def test_overtaken_entries_do_not_pile_up() -> None:
    tree = RadixTree(policy="mru")
    for token in range(4):
        tree.insert(tokens(token, 7), tokens(2 * token + 1, 2 * token + 2))
    for use in range(2_000):
        tree.match(tokens(use % 3, 7))
    assert len(tree._victims._heap) <= 2 * 4 + 64 + 1
    assert tree.evict(8).tolist() == [3, 4, 1, 2, 5, 6, 7, 8]
