"""Pages and the tree that shares them, as one allocator: taking pages evicts cached prefixes when none is free.

The pool owns which pages are free, the tree which prefixes are cached; this class keeps the two in step and is the only
one that moves pages between them. With `share` off (`--disable-radix-cache`) the tree stays empty and every request
owns all its pages.
"""

from __future__ import annotations

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree import Match, PagePool, RadixTree

NO_PAGES = np.zeros(0, dtype=np.int32)


class PrefixCache:
    """Counts are in pages."""

    def __init__(self, pool: PagePool, tree: RadixTree, page_size: int, *, share: bool) -> None:
        self.pool = pool
        self.tree = tree
        self.page_size = page_size
        self.share = share
        self.evicted = 0  # since the start

    @property
    def available(self) -> int:
        """Pages that `take` could hand out."""
        return self.pool.free + self.tree.evictable_pages

    @property
    def used_tokens(self) -> int:
        """Tokens that running requests hold; cached prefixes that nobody reads do not count."""
        return (self.pool.total - self.available) * self.page_size

    def take(self, count: int) -> IntArray:
        """`count` pages; the caller has checked `available`."""
        short = count - self.pool.free
        if short > 0:
            evicted = self.tree.evict(short)
            self.evicted += len(evicted)
            self.pool.give(evicted)
        return self.pool.take(count)

    def match_and_lock(self, tokens: IntArray, namespace: str) -> Match:
        """The longest cached prefix, protected from eviction until its node is unlocked."""
        match = self.tree.match(tokens if self.share else tokens[:0], namespace)
        self.tree.lock(match.node)
        return match

    def flush(self) -> None:
        """Forgets every prefix that nobody reads."""
        self.pool.give(self.tree.reset())


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
