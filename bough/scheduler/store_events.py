"""Tells subscribers of cache events which runs are in a store, as far as this engine knows."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree.events import DISK, EXTERNAL, KVEvent
from bough.memory.tree.node import TOKEN_BYTES
from bough.memory.tree.tree import RadixTree

MOST_BLOCKS = 1 << 21  # in the runs that are known at a time; of more, those are given up that were met longest ago


class StoreEvents:
    """Announced is what this engine wrote or read, until it removes or misses that or what is before it. The tree has
    no pages; it gives blocks the hashes that they have in other tiers."""

    def __init__(self, on_event: Callable[[KVEvent], None] | None, backend: str | None, run: int, page: int) -> None:
        """Tokens of a `run`, and of a `page`."""
        self.backend, self.on, self._run = backend, on_event is not None and backend is not None, run
        self._tree = RadixTree(page, on_event=on_event, medium=DISK if backend == "file" else EXTERNAL)
        self._runs: dict[str, tuple[IntArray, str]] = {}  # with all before them, and their namespace
        self.seen: deque[tuple[str, bool]] = deque()  # what threads have found to be there, or not

    def describe(self, keys: Sequence[str], tokens: IntArray, namespace: str, first: int = 0) -> None:
        """These are the names of the runs in `tokens`, from `first` on."""
        for number, key in enumerate(keys if self.on else (), first + 1):
            self._runs.pop(key, None)
            self._runs[key] = tokens[: number * self._run], namespace

    def tell(self) -> None:
        tree = self._tree
        while self.seen:
            key, there = self.seen.popleft()
            tokens, namespace = self._runs.get(key, (np.empty(0, dtype=np.int32), ""))
            if not there:
                self._withdraw(tokens, namespace)
            elif len(tokens) - self._run <= tree.match_length(tokens, namespace) < len(tokens):
                tree.insert(tokens, np.zeros(len(tokens) // tree.page_size, dtype=np.int32), namespace)
        while len(self._runs) * self._run > MOST_BLOCKS * tree.page_size:
            self._withdraw(*self._runs.pop(next(iter(self._runs))))

    def _withdraw(self, tokens: IntArray, namespace: str) -> None:
        """And all behind it, but for blocks that another run begins with, too."""
        found = self._tree.match(tokens, namespace)
        above, length = found.node, found.length
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
