"""Which pages are free: a stack of page numbers that hands out 1, 2, 3, ... and takes pages back.

The pool owns the free numbers and does not know who holds a page. Page 0 belongs to nobody: padding is written there.
The stack is last in, first out: reusing the most recent pages keeps a CPU's memory footprint small and its caches warm.
"""

import numpy as np

from bough.core.plan import BoolArray, IntArray


class PagePool:
    """The free ones of the pages 1..`pages`."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self.free = pages  # how many can be taken
        self._stack: IntArray = np.arange(pages, 0, -1, dtype=np.int32)  # they stand in [0, free); the top is last
        self._is_free: BoolArray = np.ones(pages + 1, dtype=np.bool_)  # page 0 stays "free", so that nobody can give it
        self._slot: IntArray = np.empty(pages + 1, dtype=np.int32)  # scratch, to see a page listed twice in one give

    def take(self, n: int) -> IntArray:
        """Hands out `n` pages; all or none. The caller has evicted as many as it takes."""
        if n > self.free:
            raise RuntimeError(f"{n} pages were asked for, but only {self.free} of {self.total} are free.")
        rest = self.free - n
        pages = self._stack[rest : self.free][::-1].copy()
        self._is_free[pages] = False
        self.free = rest
        return pages

    def give(self, pages: IntArray) -> None:
        """Takes pages back, all or none; the first of them is the next to be handed out."""
        if not len(pages):
            return
        if refusal := self._refusal(pages):
            raise ValueError(refusal)
        self._push(pages)

    def repair(self, pages: IntArray) -> int:
        """Takes back those of `pages` that are not free yet, however often they are listed; returns how many."""
        distinct = np.unique(pages)
        distinct = distinct[(distinct >= 1) & (distinct <= self.total)]
        leaked = distinct[~self._is_free[distinct]]
        self._push(leaked)
        return len(leaked)

    def free_pages(self) -> IntArray:
        """The free page numbers, in the order in which they would be handed out."""
        return self._stack[: self.free][::-1].copy()

    def check(self) -> list[str]:
        """Discrepancies between the stack and the bitmap; empty when all is well."""
        problems: list[str] = []
        stacked = self._stack[: self.free]
        if len(np.unique(stacked)) != len(stacked):
            problems.append("pool: a page stands twice among the free ones")
        if not self._is_free[stacked].all():
            problems.append("pool: a page on the free stack is marked as handed out")
        marked = int(np.count_nonzero(self._is_free[1:]))
        if marked != self.free:
            problems.append(f"pool: {marked} pages are marked free, but {self.free} can be taken")
        return problems

    def _push(self, pages: IntArray) -> None:
        top = self.free + len(pages)
        self._stack[self.free : top] = pages[::-1]
        self._is_free[pages] = True
        self.free = top

    def _refusal(self, pages: IntArray) -> str:
        """Empty: each page is one of ours, handed out, and listed once. A few passes over `pages`, no sorting."""
        foreign = pages[(pages < 1) | (pages > self.total)]
        if len(foreign):
            return f"Pages {foreign[:8].tolist()} are not pages of this pool (1..{self.total})."
        free = pages[self._is_free[pages]]
        if len(free):
            return f"Pages {free[:8].tolist()} are free already and were given back a second time."
        order = np.arange(len(pages), dtype=np.int32)
        self._slot[pages] = order  # of two equal pages, the later one wins the slot, and the earlier one finds it taken
        twice = pages[self._slot[pages] != order]
        return f"Pages {np.unique(twice)[:8].tolist()} stand twice in one list given back." if len(twice) else ""
