"""The radix tree, behaviour by behaviour."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.plan import IntArray
from bough.memory.tree.tree import RadixTree


def ids(*numbers: int) -> IntArray:
    return np.array(numbers, dtype=np.int32)


def span(first: int, last: int) -> IntArray:
    return np.arange(first, last + 1, dtype=np.int32)


@pytest.fixture
def tree() -> RadixTree:
    """1 2 3 4 in pages 11..14, 1 2 7 in 11 12 23, and 5 in 31."""
    tree = RadixTree()
    tree.insert(ids(1, 2, 3, 4), ids(11, 12, 13, 14))
    tree.insert(ids(1, 2, 7), ids(11, 12, 23))
    tree.insert(ids(5), ids(31))
    return tree


@pytest.mark.parametrize(
    ("key", "pages"),
    [
        ((), ()),
        ((9,), ()),
        ((2, 3), ()),
        ((1,), (11,)),
        ((1, 2), (11, 12)),
        ((1, 2, 9), (11, 12)),
        ((1, 2, 3), (11, 12, 13)),
        ((1, 2, 3, 4), (11, 12, 13, 14)),
        ((1, 2, 3, 4, 5, 6), (11, 12, 13, 14)),
        ((1, 2, 7, 1), (11, 12, 23)),
        ((5, 5), (31,)),
    ],
)
def test_match_finds_the_longest_prefix(tree: RadixTree, key: tuple[int, ...], pages: tuple[int, ...]) -> None:
    assert tree.match_length(ids(*key)) == len(pages)
    found = tree.match(ids(*key))
    assert found.pages.tolist() == list(pages)
    assert found.pages.dtype == np.int32
    assert found.length == len(pages)
    assert tree.check() == []


def state_of(tree: RadixTree) -> list[tuple[object, ...]]:
    return [(n.tokens, n.pages.tolist(), n.locks, n.hits, n.last_used, n.priority) for n in tree.nodes()]


def test_match_length_changes_nothing(tree: RadixTree) -> None:
    before = state_of(tree)
    assert tree.match_length(ids(1, 2, 3)) == 3
    assert state_of(tree) == before


def test_match_without_touch_leaves_the_order_of_eviction() -> None:
    tree = RadixTree()
    tree.insert(ids(1), ids(1))
    tree.insert(ids(2), ids(2))
    tree.match(ids(1), touch=False)
    assert tree.evict(1).tolist() == [1]


def test_pages_given_out_are_copies(tree: RadixTree) -> None:
    offered = ids(11, 12, 13, 14, 15)
    inserted = tree.insert(ids(1, 2, 3, 4, 5), offered)
    for array in (offered, inserted.pages, tree.match(ids(5)).pages):
        array[:] = 0
    assert tree.match(ids(1, 2, 3, 4, 5)).pages.tolist() == [11, 12, 13, 14, 15]
    assert tree.match(ids(5)).pages.tolist() == [31]


def test_namespaces_share_nothing(tree: RadixTree) -> None:
    assert tree.match(ids(1, 2), "salt").length == 0
    inserted = tree.insert(ids(1, 2), ids(41, 42), "salt")
    assert inserted.existing == 0
    assert tree.match(ids(1, 2, 3), "salt").pages.tolist() == [41, 42]
    assert tree.match(ids(1, 2, 3)).pages.tolist() == [11, 12, 13]
    assert tree.check() == []


@pytest.mark.parametrize(
    ("key", "offered", "pages", "existing"),
    [
        ((), (), (), 0),
        ((8, 9), (1, 2), (1, 2), 0),
        ((1, 2), (1, 2), (11, 12), 2),
        ((1, 2, 3), (11, 2, 3), (11, 12, 13), 3),
        ((1, 2, 3, 4), (11, 12, 13, 14), (11, 12, 13, 14), 4),
        ((1, 2, 3, 8), (1, 2, 3, 4), (11, 12, 13, 4), 3),
        ((1, 9), (11, 2), (11, 2), 1),
        ((5, 6), (31, 2), (31, 2), 1),
    ],
)
def test_insert_keeps_the_trees_own_pages(
    tree: RadixTree, key: tuple[int, ...], offered: tuple[int, ...], pages: tuple[int, ...], existing: int
) -> None:
    before = tree.total_pages
    inserted = tree.insert(ids(*key), ids(*offered))
    assert inserted.pages.tolist() == list(pages)
    assert inserted.existing == existing
    assert tree.total_pages == before + len(key) - existing
    assert tree.match(ids(*key)).node is inserted.node
    assert tree.check() == []


def test_insert_refuses_a_wrong_number_of_pages() -> None:
    with pytest.raises(ValueError, match="9 tokens fill 2 pages, but 3 were given"):
        RadixTree(page_size=4).insert(span(1, 9), ids(1, 2, 3))


def test_only_whole_pages_enter_and_match() -> None:
    tree = RadixTree(page_size=4)
    assert tree.insert(span(1, 11), ids(1, 2)).existing == 0
    assert tree.match_length(span(1, 11)) == 8
    assert tree.match(span(1, 7)).pages.tolist() == [1]
    differs_in_second_page = np.concatenate([span(1, 6), ids(0, 0, 0)])
    found = tree.match(differs_in_second_page)
    assert (found.length, found.pages.tolist()) == (4, [1])
    assert tree.match(span(1, 3)).length == 0
    same_first_token = ids(1, 9, 9, 9)
    assert tree.insert(same_first_token, ids(3)).existing == 0
    assert tree.check() == []


def test_lock_protects_the_path_and_counts_pages(tree: RadixTree) -> None:
    node = tree.match(ids(1, 2, 3, 4)).node
    tree.lock(node)
    assert (tree.protected_pages, tree.evictable_pages, tree.total_pages) == (4, 2, 6)
    assert sorted(tree.evict(100).tolist()) == [23, 31]
    tree.lock(node)
    tree.unlock(node)
    assert tree.protected_pages == 4
    tree.unlock(node)
    assert (tree.protected_pages, tree.evictable_pages) == (0, 4)
    assert sorted(tree.evict(100).tolist()) == [11, 12, 13, 14]
    assert tree.check() == []


def test_a_lock_outlives_splits_of_its_node(tree: RadixTree) -> None:
    node = tree.insert(span(50, 59), span(50, 59)).node
    tree.lock(node)
    upper = tree.match(span(50, 53)).node
    tree.insert(ids(50, 51, 99), ids(50, 51, 99))
    assert tree.protected_pages == 10
    assert tree.match(span(50, 59)).node is node
    tree.unlock(node)
    assert tree.protected_pages == 0
    assert upper.locks == 0
    assert tree.check() == []


def test_both_halves_of_a_split_keep_their_history_and_own_their_memory() -> None:
    tree = RadixTree()
    node = tree.insert(ids(1, 2, 3), ids(1, 2, 3), priority=4).node
    tree.match(ids(1, 2, 3))
    upper = tree.match(ids(1, 2), touch=False).node
    for half in (upper, node):
        assert (half.created, half.last_used, half.hits, half.priority) == (1, 2, 1, 4)
        assert half.pages.base is None
    assert upper.pages.tolist() == [1, 2] and node.pages.tolist() == [3]


def test_a_miss_can_be_locked(tree: RadixTree) -> None:
    node = tree.match(ids(9)).node
    tree.lock(node)
    assert tree.protected_pages == 0
    tree.unlock(node)
    assert len(tree.evict(100)) == 6
    assert tree.evict(1).tolist() == []


def test_an_empty_insert_does_not_offer_the_root_for_eviction() -> None:
    tree = RadixTree()
    assert tree.insert(ids(), ids()).existing == 0
    assert tree.evict(1).tolist() == []
    assert tree.check() == []


def test_unlocking_too_often_or_a_removed_node_is_an_error(tree: RadixTree) -> None:
    node = tree.match(ids(5)).node
    with pytest.raises(ValueError, match="more often"):
        tree.unlock(node)
    tree.evict(100)
    with pytest.raises(ValueError, match="has left the tree"):
        tree.lock(node)


def test_eviction_cuts_the_tail_of_a_long_leaf() -> None:
    tree = RadixTree(page_size=2)
    tree.insert(span(1, 20), span(1, 10))
    assert tree.evict(3).tolist() == [8, 9, 10]
    assert tree.match(span(1, 20)).pages.tolist() == list(range(1, 8))
    assert tree.evict(0).tolist() == []
    assert tree.evict(2).tolist() == [6, 7]
    assert tree.check() == []
    assert tree.insert(span(1, 20), span(11, 20)).existing == 10


def test_eviction_frees_parents_after_their_children(tree: RadixTree) -> None:
    tree.match(ids(5))
    assert tree.evict(2).tolist() == [13, 14]
    assert tree.evict(1).tolist() == [23]
    assert tree.evict(1).tolist() == [12]
    assert tree.evict(5).tolist() == [11, 31]
    assert tree.total_pages == 0
    assert tree.check() == []


def test_a_matched_prefix_outlives_the_tail_that_was_not_read() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2, 3), ids(1, 2, 3))
    tree.insert(ids(9), ids(9))
    tree.match(ids(1, 2))
    assert tree.evict(1).tolist() == [3]
    assert tree.evict(1).tolist() == [9]


def test_reset_drops_all_but_locked_paths(tree: RadixTree) -> None:
    node = tree.match(ids(1, 2, 7)).node
    tree.insert(ids(60), ids(60))
    tree.match(ids(1, 2, 7))
    assert tree.evict(2).tolist() == [13, 14]  # all leaves are ranked now
    tree.lock(node)
    assert sorted(tree.reset().tolist()) == [31, 60]
    assert not tree._victims._heap  # they would keep dropped nodes alive
    assert sorted(tree.pages_in_use().tolist()) == [11, 12, 23]
    assert tree.check() == []
    tree.unlock(node)
    assert tree.evict(1).tolist() == [23]
    assert tree.check() == []
    assert sorted(tree.reset().tolist()) == [11, 12]
    assert tree.reset().tolist() == []
    assert tree.total_pages == 0 and tree.check() == []


def test_a_tree_of_many_levels_does_not_exhaust_the_stack() -> None:
    tree = RadixTree()
    depth = 1_200  # past the interpreter's recursion limit
    key = span(1, depth)
    for length in range(1, depth + 1):
        node = tree.insert(key[:length], key[:length]).node
    tree.lock(node)
    assert tree.protected_pages == depth
    assert tree.evict(1).tolist() == []
    tree.unlock(node)
    assert tree.check() == []
    assert len(list(tree.nodes())) == depth
    assert tree.evict(depth - 1).tolist() == list(range(depth, 1, -1))
    assert tree.reset().tolist() == [1]


def test_check_names_what_is_broken(tree: RadixTree) -> None:
    node = tree.match(ids(1, 2, 3, 4)).node
    node.locks = 2
    assert any("fewer locks" in problem for problem in tree.check())
    assert any("protected pages on the books" in problem for problem in tree.check())
    node.locks = 0
    kept, node.pages = node.pages, ids(11)
    assert any("1 pages for 2 tokens" in problem for problem in tree.check())
    assert any("page 11 belongs more than once" in problem for problem in tree.check())
    node.pages, edge = kept, node.edge
    node.edge = b"wrong"
    assert any("another key than its own" in problem for problem in tree.check())
    node.edge, parent = edge, node.parent
    node.parent = None
    assert any("does not know its parent" in problem for problem in tree.check())
    node.parent = parent
    assert tree.check() == []
    tree._victims.clear()
    assert tree.check() == ["victims: 3 evictable leaves would never be found"]
