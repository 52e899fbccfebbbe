"""The audit over all owners of pages: what it accepts, and what it says about a page with no owner or two."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.plan import IntArray
from bough.memory.tree.audit import audit_pages
from bough.memory.tree.pool import PagePool
from bough.memory.tree.tree import RadixTree


def ids(*numbers: int) -> IntArray:
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def books() -> tuple[PagePool, RadixTree]:
    """Ten pages: 1..3 in the tree (locked), 4 and 5 taken, 6..10 free."""
    pool, tree = PagePool(10), RadixTree()
    tree.lock(tree.insert(ids(7, 8, 9), pool.take(3)).node)
    pool.take(2)
    return pool, tree


def test_every_page_has_one_owner(books: tuple[PagePool, RadixTree]) -> None:
    problems, leaked = audit_pages(*books, {"a": ids(4), "b": ids(5), "c": ids()})
    assert problems == [] and leaked.tolist() == []


def test_leaked_pages_are_named_and_can_be_repaired(books: tuple[PagePool, RadixTree]) -> None:
    pool, tree = books
    problems, leaked = audit_pages(pool, tree, {"a": ids(4)})
    assert problems == [
        "5 free + 0 evictable + 3 protected + 1 held = 9, and there are 10 pages",
        "1 pages belong to nobody: 5",
    ]
    assert leaked.tolist() == [5] and leaked.dtype == np.int32
    assert pool.repair(leaked) == 1
    assert audit_pages(pool, tree, {"a": ids(4)}).problems == []


def test_a_page_with_several_owners_names_them_all(books: tuple[PagePool, RadixTree]) -> None:
    problems, leaked = audit_pages(*books, {"a": ids(4, 2), "b": ids(5, 4), "c": ids(10)})
    assert leaked.tolist() == []
    assert problems[1:] == [
        "page 2 belongs to the tree and to a",
        "page 4 belongs to a and to b",
        "page 10 belongs to the free pool and to c",
    ]


def test_a_page_that_stands_twice_in_the_tree_is_named() -> None:
    pool, tree = PagePool(10), RadixTree()
    tree.insert(ids(7, 8), pool.take(2))
    tree.insert(ids(9), ids(2))
    problems, leaked = audit_pages(pool, tree, {})
    assert leaked.tolist() == []
    assert "tree: page 2 belongs more than once" in problems
    assert "page 2 belongs to the tree and to the tree" in problems


def test_pages_that_do_not_exist_are_reported(books: tuple[PagePool, RadixTree]) -> None:
    problems, _ = audit_pages(*books, {"a": ids(4, 0, 11), "b": ids(5)})
    assert problems == ["a owns page 0, which does not exist", "a owns page 11, which does not exist"]


def test_a_long_list_is_cut() -> None:
    pool = PagePool(100)
    pool.take(100)
    everything = np.arange(1, 101, dtype=np.int32)
    problems, _ = audit_pages(pool, RadixTree(), {"a": everything, "b": everything})
    assert len(problems) == 22 and problems[-1] == "... and 80 more pages with several owners"
    problems, leaked = audit_pages(pool, RadixTree(), {})
    assert len(problems) == 2 and problems[-1].endswith("19 20 ...") and len(leaked) == 100


def test_an_owners_own_problems_are_included(books: tuple[PagePool, RadixTree]) -> None:
    pool, tree = books
    tree.protected_pages = 4
    assert "tree: 4 protected pages on the books, 3 counted" in audit_pages(pool, tree, {"a": ids(4, 5)}).problems
