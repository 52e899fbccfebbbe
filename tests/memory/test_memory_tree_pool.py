"""The page pool: order of reuse, exhaustion, and refusal of pages it did not hand out."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.plan import IntArray
from bough.memory.tree.pool import PagePool


def pages(*numbers: int) -> IntArray:
    return np.array(numbers, dtype=np.int32)


def test_fresh_pages_come_in_order_and_never_page_zero() -> None:
    pool = PagePool(5)
    assert pool.take(2).tolist() == [1, 2]
    assert pool.take(3).tolist() == [3, 4, 5]
    assert pool.free == 0 and pool.total == 5


def test_pages_are_int32_and_a_copy() -> None:
    pool = PagePool(4)
    taken = pool.take(2)
    assert taken.dtype == np.int32
    taken[:] = 99
    assert pool.check() == []
    assert pool.take(2).tolist() == [3, 4]


def test_what_came_back_last_goes_out_first() -> None:
    pool = PagePool(6)
    pool.take(4)
    pool.give(pages(1, 2))
    pool.give(pages(4))
    assert pool.free_pages().tolist() == [4, 1, 2, 5, 6]
    assert pool.take(4).tolist() == [4, 1, 2, 5]


def test_taking_and_giving_nothing_is_allowed() -> None:
    pool = PagePool(1)
    pool.take(1)
    assert pool.take(0).tolist() == []
    pool.give(pages())
    assert pool.free == 0


def test_taking_too_many_takes_none() -> None:
    pool = PagePool(3)
    with pytest.raises(RuntimeError, match="4 pages were asked for, but only 3 of 3"):
        pool.take(4)
    assert pool.free == 3 and pool.check() == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (pages(2, 4), "free already"),
        (pages(1, 2, 1), "stand twice"),
        (pages(0), "not pages of this pool"),
        (pages(-1, 2), "not pages of this pool"),
        (pages(1, 6), "not pages of this pool"),
    ],
)
def test_refused_pages_change_nothing(given: IntArray, reason: str) -> None:
    pool = PagePool(5)
    pool.take(3)
    with pytest.raises(ValueError, match=reason):
        pool.give(given)
    assert pool.free == 2 and pool.check() == []
    pool.give(pages(3, 1, 2))
    assert pool.free == 5 and pool.check() == []


def test_repair_takes_back_only_what_is_missing() -> None:
    pool = PagePool(5)
    pool.take(4)
    assert pool.repair(pages(2, 5, 2, 0, 9)) == 1
    assert pool.free == 2 and pool.check() == []


def test_check_sees_a_broken_book() -> None:
    pool = PagePool(4)
    pool.take(2)
    pool._is_free[1] = True
    assert pool.check() == ["pool: 3 pages are marked free, but 2 can be taken"]
    pool._is_free[1] = False
    pool._stack[0] = pool._stack[1]
    assert "pool: a page stands twice among the free ones" in pool.check()
    pool._is_free[pool._stack[0]] = False
    assert "pool: a page on the free stack is marked as handed out" in pool.check()
