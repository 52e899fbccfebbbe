"""The pages of one KV group beside full attention: of layers with a sliding window, or of recurrent states.

Full attention needs every page of a prefix, so its pages live and die with the nodes of the tree. Other groups need
less: a layer with a window reads only the last pages, a recurrent layer one snapshot of its state. Their pages come
and go one by one. A page is kept while a running request reads it or the tree caches it; the tree's are evicted when
pages run out, least recently read first.

A node of the tree names its page by number and generation. Evicting a page changes its generation, and a name of an
older generation counts as absent. So an eviction need not find the nodes that name its pages.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bough.core.model_config import KVGroup
from bough.core.plan import BoolArray, IntArray
from bough.memory.tree.pool import PagePool

NameArray = npt.NDArray[np.int64]  # generation << 32 | page; 0 names no page

EVICTED_SHARE = 32  # an eviction frees at least 1/32 of the pages, because finding victims looks at all of them


class GroupPages:
    """Owns which pages of the group are free, read or cached."""

    def __init__(self, group: KVGroup, pages: int, page_size: int) -> None:
        self.is_state = group.kind == "state"
        self._window = group.window
        self.row_pages = group.row_pages(page_size)
        self.pool = PagePool(pages)
        self._page_size = page_size
        self._readers: IntArray = np.zeros(pages + 1, dtype=np.int32)
        self._cached: BoolArray = np.zeros(pages + 1, dtype=np.bool_)
        self._generation: NameArray = np.ones(pages + 1, dtype=np.int64)
        self._last_read: NameArray = np.zeros(pages + 1, dtype=np.int64)
        self._clock = 0
        self._evictable = 0

    @property
    def available(self) -> int:
        """Pages that `take` could hand out."""
        return self.pool.free + self._evictable

    # -- what running requests do --------------------------------------------------------------------------------------

    def take(self, count: int) -> IntArray:
        """`count` pages with one reader each; the caller has checked `available`."""
        short = count - self.pool.free
        if short > 0:
            self._evict(max(short, self.pool.total // EVICTED_SHARE))
        pages = self.pool.take(count)
        self._readers[pages] = 1
        return pages

    def hold(self, pages: IntArray) -> None:
        """One more reader for each of these pages, which the tree caches; none is listed twice."""
        self._evictable -= int(np.count_nonzero(self._readers[pages] == 0))
        self._readers[pages] += 1

    def release(self, pages: IntArray) -> None:
        """One reader less for each of these pages, as often as it is listed. The last reader frees what is not
        cached."""
        if not len(pages):
            return
        np.subtract.at(self._readers, pages, 1)
        pages = np.unique(pages)
        unread = pages[self._readers[pages] == 0]
        cached = self._cached[unread]
        self._clock += 1
        self._last_read[unread] = self._clock
        self._evictable += int(np.count_nonzero(cached))
        self.pool.give(unread[~cached])

    def first_needed(self, lengths: IntArray) -> IntArray:
        """The first page that rows of these lengths still read. One page more is kept: a row may be cut back by some
        tokens, to the beginning of a page (see `RunningBatch.rewind`)."""
        assert self._window is not None
        first: IntArray = np.maximum(lengths - self._window - self._page_size, 0) // self._page_size
        return first

    # -- what the tree does --------------------------------------------------------------------------------------------

    def cache(self, names: NameArray, pages: IntArray) -> NameArray:
        """`names` of a run of tokens, completed by those of `pages` that stand where no live name does; the tree owns
        these from now on. 0 in `pages` offers none."""
        offered = (pages > 0) & ~self._live(names) & ~self._cached[pages]
        if not offered.any():
            return names
        new = pages[offered]
        self._cached[new] = True
        self._evictable += int(np.count_nonzero(self._readers[new] == 0))
        names = names.copy()
        names[offered] = self._generation[new] << 32 | new
        return names

    def drop(self, names: NameArray) -> None:
        """The tree forgets these names."""
        self._uncache(_pages(names[self._live(names)]))

    def usable(self, names: NameArray) -> BoolArray:
        """For each number of pages from 1 on: whether a request could go on behind so many, given the names of their
        pages."""
        ends = np.arange(1, len(names) + 1)
        absent = np.concatenate([[0], np.cumsum(~self._live(names))])
        usable: BoolArray = absent[ends] == absent[self.first_read(ends)]
        return usable

    def needed(self, names: NameArray) -> IntArray:
        """The pages that a request reads which goes on behind these; 0 for those that it does not."""
        pages = _pages(names)
        pages[: self.first_read(len(names))] = 0
        return pages

    def first_read(self, count: Any) -> Any:
        """The first page that a request reads which goes on behind `count` pages: a number, or an array of them."""
        if self._window is None:
            return np.maximum(count - 1, 0)
        return np.maximum(count * self._page_size - self._window + 1, 0) // self._page_size

    def present(self, names: NameArray) -> IntArray:
        """The pages that these names still have; 0 for those without one."""
        pages: IntArray = np.where(self._live(names), _pages(names), 0)
        return pages

    def check(self, held: Mapping[str, IntArray], names: NameArray) -> list[str]:
        """Discrepancies between these books, what requests hold and what the tree names; empty when all is well."""
        problems = self.pool.check()
        readers = np.zeros_like(self._readers)
        for pages in held.values():
            np.add.at(readers, pages, 1)
        wrong = np.flatnonzero(readers != self._readers)
        if len(wrong):
            problems.append(f"group: pages {wrong[:8].tolist()} have other readers than the requests say")
        live = _pages(names[self._live(names)])
        if len(np.unique(live)) != len(live):
            problems.append("group: a page stands twice in the tree")
        if not np.array_equal(np.sort(live), np.flatnonzero(self._cached)):
            problems.append("group: the tree names other pages than are marked as cached")
        kept = np.flatnonzero((self._readers > 0) | self._cached)
        if len(np.intersect1d(kept, self.pool.free_pages())) or len(kept) + self.pool.free != self.pool.total:
            problems.append(f"group: {len(kept)} kept + {self.pool.free} free pages of {self.pool.total}")
        evictable = int(np.count_nonzero(self._cached & (self._readers == 0)))
        if evictable != self._evictable:
            problems.append(f"group: {self._evictable} evictable pages on the books, {evictable} counted")
        return problems

    # -- internals -----------------------------------------------------------------------------------------------------

    def _live(self, names: NameArray) -> BoolArray:
        live: BoolArray = (names != 0) & (self._generation[_pages(names)] == names >> 32)
        return live

    def _evict(self, count: int) -> None:
        victims = np.flatnonzero(self._cached & (self._readers == 0)).astype(np.int32)
        if count < len(victims):
            victims = victims[np.argpartition(self._last_read[victims], count - 1)[:count]]
        self._uncache(victims)

    def _uncache(self, pages: IntArray) -> None:
        self._cached[pages] = False
        self._generation[pages] += 1
        unread = pages[self._readers[pages] == 0]
        self._evictable -= len(unread)
        self.pool.give(unread)


def _pages(names: NameArray) -> IntArray:
    return (names & 0xFFFFFFFF).astype(np.int32)
