"""Which worker was sent which texts: a radix tree over characters, the gateway's guess at what workers have cached.

It is approximate on purpose: the gateway has no tokenizer and does not see evictions, but a prefix in characters is a
prefix in tokens, give or take the last one. Each node owns a piece of text and says which workers were sent it and
when last. A worker that holds a node holds all nodes above it: `insert` marks whole paths and eviction takes a worker
off leaves first. Text is compared in C, by whole pieces; only where two texts part is the place searched by halving.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class TextNode:
    """A piece of text below its parent's, with the workers that hold it and when each was last sent it."""

    text: str
    parent: TextNode | None
    holders: dict[str, float]
    children: dict[str, TextNode] = field(default_factory=dict)  # by the first character of their text


def common_length(left: str, right: str, start: int) -> int:
    """How many characters of `left` stand at `start` in `right`."""
    if right.startswith(left, start):
        return len(left)
    same, differs = 0, min(len(left), len(right) - start) + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if right.startswith(left[same:middle], start + same):
            same = middle
        else:
            differs = middle
    return same


class TextTree:
    """Owns the nodes and, per worker, how many characters it holds."""

    def __init__(self) -> None:
        self._root = TextNode("", None, {})
        self._sizes: dict[str, int] = {}
        self._stamp = 0.0

    def match(self, text: str, since: float = 0.0) -> dict[str, int]:
        """How many leading characters of `text` each worker holds; only what it was sent at `since` or later counts."""
        held: dict[str, int] = {}
        node, depth = self._root, 0
        while depth < len(text):
            child = node.children.get(text[depth])
            if child is None:
                break
            same = common_length(child.text, text, depth)
            depth += same
            for worker, stamp in child.holders.items():
                if stamp >= since:
                    held[worker] = depth
            if same < len(child.text):
                break
            node = child
        return held

    def insert(self, text: str, worker: str, now: float = 0.0) -> None:
        """Remembers that `worker` was sent `text`."""
        stamp = self._stamp = max(now, self._stamp + 1e-6)  # later is always more, whatever the clock's steps
        node, depth = self._root, 0
        while depth < len(text):
            child = node.children.get(text[depth])
            if child is None:
                child = TextNode(text[depth:], node, {})
                node.children[text[depth]] = child
            else:
                same = common_length(child.text, text, depth)
                if same < len(child.text):
                    child = self._split(child, same)
            if worker not in child.holders:
                self._sizes[worker] = self._sizes.get(worker, 0) + len(child.text)
            child.holders[worker] = stamp
            depth += len(child.text)
            node = child

    def _split(self, node: TextNode, at: int) -> TextNode:
        """Cuts a node in two and returns the upper one."""
        parent = node.parent
        assert parent is not None
        upper = TextNode(node.text[:at], parent, dict(node.holders), {node.text[at]: node})
        parent.children[upper.text[0]] = upper
        node.text, node.parent = node.text[at:], upper
        return upper

    def evict(self, most_chars: int) -> None:
        """Takes every worker that holds more than `most_chars` off the leaves it was sent longest ago."""
        large = [worker for worker, size in self._sizes.items() if size > most_chars]
        for worker in large:
            self._shrink(worker, most_chars)

    def _shrink(self, worker: str, most_chars: int) -> None:
        leaves = [
            (node.holders[worker], id(node), node)
            for node in self.nodes()
            if worker in node.holders and not _held_below(node, worker)
        ]
        heapq.heapify(leaves)
        while leaves and self._sizes[worker] > most_chars:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            assert parent is not None
            self._release(node, worker)
            if parent is not self._root and not _held_below(parent, worker):
                heapq.heappush(leaves, (parent.holders[worker], id(parent), parent))

    def _release(self, node: TextNode, worker: str) -> None:
        del node.holders[worker]
        self._sizes[worker] -= len(node.text)
        if not node.holders and node.parent is not None:
            del node.parent.children[node.text[0]]

    def remove(self, worker: str) -> None:
        """Forgets all that `worker` holds."""
        for node in list(self.nodes()):
            if worker in node.holders:
                self._release(node, worker)
        self._sizes.pop(worker, None)

    def size(self, worker: str) -> int:
        """How many characters `worker` holds."""
        return self._sizes.get(worker, 0)

    def nodes(self) -> Iterator[TextNode]:
        """All nodes but the root, parents before children."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def check(self) -> None:
        """Proves that pieces, holders and sizes agree."""
        sizes: dict[str, int] = dict.fromkeys(self._sizes, 0)
        for node in self.nodes():
            parent = node.parent
            assert node.text and node.holders, "a node without text or holder"
            assert parent is not None and parent.children[node.text[0]] is node, "a node that its parent does not know"
            if parent is not self._root:
                assert node.holders.keys() <= parent.holders.keys(), "a holder without the text before"
            for worker in node.holders:
                sizes[worker] += len(node.text)
        assert sizes == self._sizes, "sizes that do not add up"


def _held_below(node: TextNode, worker: str) -> bool:
    return any(worker in child.holders for child in node.children.values())
