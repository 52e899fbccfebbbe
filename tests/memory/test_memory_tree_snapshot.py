"""The picture of the tree that people watch: true, bounded, and without a trace in the tree."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.plan import IntArray
from bough.memory.tree.snapshot import LOOKED_AT, TEXT_TOKENS, recent_nodes, snapshot, tokens_of
from bough.memory.tree.tree import RadixTree


def ids(*numbers: int) -> IntArray:
    return np.array(numbers, dtype=np.int32)


def grown(seed: int, requests: int = 60) -> RadixTree:
    """Random prefixes of few tokens, so that nodes split often; some leaves are evicted again."""
    random = np.random.default_rng(seed)
    tree, page = RadixTree(), 1
    for number in range(requests):
        key = random.integers(0, 3, random.integers(1, 9)).astype(np.int32)
        tree.insert(key, np.arange(page, page + len(key), dtype=np.int32), namespace="ab"[number % 2])
        page += len(key)
        if number % 7 == 0:
            tree.evict(2)
    return tree


def names(tree: RadixTree, limit: int = 10_000) -> list[tuple[int, int]]:
    return [(node.created, start) for node, _, start in recent_nodes(tree.root, limit)]


def test_columns_tell_each_node_and_its_parent() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2, 3, 4), ids(11, 12, 13, 14))
    tree.insert(ids(1, 2, 7), ids(11, 12, 23))  # splits the first
    tree.lock(tree.match(ids(1, 2, 3, 4)).node)
    seen = snapshot(tree, 100)
    assert (seen["clock"], seen["cached_tokens"]) == (3, 5)
    assert seen["parent"] == [-1, 0, 0] and seen["tokens"] == [2, 2, 1]
    assert seen["used"] == [3, 3, 2] and seen["hits"] == [1, 1, 0] and seen["locks"] == [1, 1, 0]


def test_requests_are_told_with_the_last_node_of_theirs_that_is_shown() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2, 3, 4), ids(11, 12, 13, 14))
    tree.insert(ids(1, 2, 7), ids(11, 12, 23))
    four, seven = (tree.match(key).node for key in (ids(1, 2, 3, 4), ids(1, 2, 7)))
    readers = [(901, four), (902, seven), (903, tree.root)]
    seen = snapshot(tree, 100, readers)
    assert [number for number, _ in seen["readers"]] == [901, 902, 903]
    assert [seen["tokens"][place] for _, place in seen["readers"][:2]] == [2, 1] and seen["readers"][2][1] == -1
    assert {seen["parent"][place] for _, place in seen["readers"][:2]} == {0}
    assert snapshot(tree, 1, readers)["readers"] == [(901, 0)], "its own node is not shown; no more than the limit"


@pytest.mark.parametrize("seed", range(5))
def test_all_nodes_are_shown_once_with_names_of_their_own(seed: int) -> None:
    tree = grown(seed)
    found = [node for node, _, _ in recent_nodes(tree.root, 10_000)]
    assert sorted(map(id, found)) == sorted(map(id, tree.nodes()))
    assert len(set(names(tree))) == len(found) == snapshot(tree, 3)["nodes"], "the total, however few are shown"


@pytest.mark.parametrize("seed", range(5))
def test_parents_come_first_and_those_used_last(seed: int) -> None:
    tree = grown(seed)
    seen = snapshot(tree, 10)
    assert len(seen["parent"]) == 10 and all(parent < number for number, parent in enumerate(seen["parent"]))
    assert seen["used"] == sorted(seen["used"], reverse=True)
    assert max(node.last_used for node in tree.nodes()) == seen["used"][0]


def test_a_look_changes_nothing() -> None:
    tree = grown(3)

    def state() -> list[tuple[int, ...]]:
        return [(n.created, n.last_used, n.hits, n.locks, n.ticket, len(n.children)) for n in tree.nodes()]

    before, clock = state(), tree.clock
    snapshot(tree, 10)
    tokens_of(tree, 0, 0, 10)
    assert (state(), tree.clock) == (before, clock)


def test_no_more_is_looked_at_than_a_multiple_of_the_limit() -> None:
    tree = RadixTree()
    for number in range(500):
        tree.insert(ids(number), ids(number + 1))
    tree.match(ids(0))  # the oldest child is used last of all, but stands behind those that can be looked at
    seen = [node.created for node, _, _ in recent_nodes(tree.root, 10)]
    assert seen == list(range(500, 490, -1))
    assert 1 in [node.created for node, _, _ in recent_nodes(tree.root, 500 // LOOKED_AT)]


def test_tokens_of_a_node_are_found_by_its_name() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2, 3, 4), ids(11, 12, 13, 14))
    tree.insert(ids(1, 2, 7), ids(11, 12, 23))
    assert tokens_of(tree, 1, 0, 100) == [1, 2]
    assert tokens_of(tree, 1, 2, 100) == [3, 4]
    assert tokens_of(tree, 2, 2, 100) == [7]
    assert tokens_of(tree, 2, 0, 100) is None
    long = np.arange(TEXT_TOKENS + 5, dtype=np.int32) + 50
    tree.insert(long, long)
    assert tokens_of(tree, 3, 0, 100) == long[:TEXT_TOKENS].tolist()
