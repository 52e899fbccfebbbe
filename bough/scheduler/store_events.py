"""Tells subscribers of cache events which runs are in a store, as far as this engine knows."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree.events import DISK, EXTERNAL, KVEvent
from bough.memory.tree.node import TOKEN_BYTES
from bough.memory.tree.tree import NO_PAGES, RadixTree

MOST_BLOCKS = 1 << 21  # in the runs that are known at a time; of more, those are given up that were met longest ago


class StoreEvents:
    """Announced is what this engine wrote or read, until it removes or misses that or what is before it. The tree has
    no pages; it gives blocks the hashes that they have in other tiers."""

    def __init__(self, on_event: Callable[[KVEvent], None] | None, backend: str | None, run: int, page: int) -> None:
        """Tokens of a `run`, and of a `page`."""
        self.backend, self.on, self._run = backend, on_event is not None and backend is not None, run
        self._tree = RadixTree(page, on_event=on_event, medium=DISK if backend == "file" else EXTERNAL)
        self._runs: dict[str, tuple[str, IntArray, str]] = {}  # the one before each, its own tokens, their namespace
        self.seen: deque[tuple[str, bool]] = deque()  # what threads have found to be there, or not

    def describe(self, keys: Sequence[str], tokens: IntArray, namespace: str) -> None:
        """These are the names of the runs in `tokens`."""
        for number, key in enumerate(keys if self.on else ()):
            self._runs.pop(key, None)
            own = tokens[number * self._run :][: self._run].copy()  # each is kept once, however many begin with it
            self._runs[key] = keys[number - 1] if number else "", own, namespace

    def prefix(self, key: str) -> tuple[IntArray, str]:
        """The tokens of a run with all before it, and their namespace; none where one of them is not known."""
        parts, namespace = list[IntArray](), ""
        while key in self._runs:
            key, own, namespace = self._runs[key]
            parts.insert(0, own)
        return NO_PAGES if key else np.concatenate([NO_PAGES, *parts]), namespace

    def tell(self) -> None:
        tree = self._tree
        while self.seen:
            key, there = self.seen.popleft()
            tokens, namespace = self.prefix(key)
            if not there:
                self._withdraw(tokens, namespace)
            elif len(tokens) - self._run <= tree.match_length(tokens, namespace) < len(tokens):
                tree.insert(tokens, np.zeros(len(tokens) // tree.page_size, dtype=np.int32), namespace)
        while len(self._runs) * self._run > MOST_BLOCKS * tree.page_size:
            self._withdraw(*self.prefix(oldest := next(iter(self._runs))))
            del self._runs[oldest]

    def _withdraw(self, tokens: IntArray, namespace: str) -> None:
        """And all behind it, but for blocks that another run begins with, too."""
        above, _, length, *_ = self._tree.match(tokens, namespace)
        if not length or length < len(tokens):
            return
        while length == len(tokens) or (length % self._run and len(above.children) == 1):
            assert above.parent is not None
            length, above = length - len(above.tokens) // TOKEN_BYTES, above.parent
        self._tree.lock(above)
        self._tree.forget(tokens, namespace)
        self._tree.unlock(above)

    def withdraw(self) -> None:
        """Nothing that was seen so far can be found any more."""
        self._runs = {}
        self._tree.reset()
