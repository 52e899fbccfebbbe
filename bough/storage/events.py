"""Tells subscribers of cache events which runs are in a store, as far as this engine knows."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree.events import DISK, EXTERNAL, KVEvent
from bough.memory.tree.node import Node, key_of
from bough.memory.tree.tree import RadixTree
from bough.storage.store import RUN_TOKENS

MOST_BLOCKS, MOST_RUNS = 1 << 21, 1 << 16  # that are announced at a time, and described; of more, the oldest are not


class StoreEvents:
    """Announced is what this engine wrote or read, until it removes or misses that or what is before it. The tree has
    no pages; it gives blocks the hashes that they have in other tiers."""

    def __init__(self, on_event: Callable[[KVEvent], None] | None, backend: str | None, page_size: int) -> None:
        self.backend, self.on = backend, on_event is not None and backend is not None
        self._tree = RadixTree(page_size, on_event=on_event, medium=DISK if backend == "file" else EXTERNAL)
        self._described: dict[str, tuple[IntArray, str]] = {}  # runs with all before them, and their namespace
        self._ends: dict[str, Node] = {}  # of announced runs
        self.seen: deque[tuple[str, bool]] = deque()  # what threads have found to be there, or not

    def describe(self, keys: Sequence[str], tokens: IntArray, namespace: str, first: int = 0) -> None:
        """These are the names of the runs in `tokens`, from `first` on."""
        if len(self._described) > MOST_RUNS:
            self._described.clear()
        if self.on:
            ends = range((first + 1) * RUN_TOKENS, len(tokens) + 1, RUN_TOKENS)
            self._described.update((key, (tokens[:end], namespace)) for key, end in zip(keys, ends, strict=True))

    def tell(self) -> None:
        tree = self._tree
        while self.seen:
            key, there = self.seen.popleft()
            if there and key in self._described:
                tokens, namespace = self._described.pop(key)
                if tree.match_length(tokens, namespace) == len(tokens) - RUN_TOKENS:
                    pages = np.zeros(len(tokens) // tree.page_size, dtype=np.int32)
                    self._ends[key] = tree.insert(tokens, pages, namespace).node
            elif not there and (above := (node := self._ends.pop(key, tree.root)).parent) is not None:
                tree.lock(above)
                tree.forget(*key_of(node))
                tree.unlock(above)
        if tree.total_pages > MOST_BLOCKS:
            tree.evict(MOST_BLOCKS // 8)
            self._ends = {key: node for key, node in self._ends.items() if node.parent is not None}

    def withdraw(self) -> None:
        """Nothing that was seen so far can be found any more."""
        self._described, self._ends = {}, {}
        self._tree.reset()
