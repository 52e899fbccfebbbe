"""Which worker was sent which texts: a radix tree over characters that approximates the workers' caches.

A worker that holds a node holds all nodes above it: `insert` marks whole paths, and eviction starts at the lowest
nodes. Text is compared in C, in whole pieces.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

MOST_NODES = 2**18  # of one worker; a node takes about half a KiB besides its text


@dataclass(slots=True, eq=False)
class TextNode:
    """A piece of text, with the workers that hold it and when each was last sent it."""

    text: str
    parent: TextNode | None
    holders: dict[str, float]
    children: dict[str, TextNode] = field(default_factory=dict)  # by the first character of their text


def common_length(left: str, right: str, start: int) -> int:
    """How many characters of `left` stand at `start` in `right`."""
    same, differs = 0, min(len(left), len(right) - start) + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if right.startswith(left[same:middle], start + same):
            same = middle
        else:
            differs = middle
    return same


class TextTree:
    """`_ends` holds each worker's lowest nodes, oldest first, so that eviction needs no walk over the tree."""

    def __init__(self, most_nodes: int = MOST_NODES) -> None:
        self._root = TextNode("", None, {})
        self._most_nodes = most_nodes
        self._sizes: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._ends: dict[str, OrderedDict[TextNode, None]] = defaultdict(OrderedDict)
        self._stamp = 0.0

    def size(self, worker: str) -> int:
        """How many characters the worker was sent and is taken to hold."""
        return self._sizes.get(worker, 0)

    def match(self, text: str, since: float = 0.0) -> dict[str, int]:
        """How many leading characters of `text` each worker was sent at `since` or later."""
        held: dict[str, int] = {}
        node, depth, length = self._root, 0, len(text)
        while depth < length:
            child = node.children.get(text[depth])
            if child is None:
                break
            piece = child.text
            same = len(piece) if text.startswith(piece, depth) else common_length(piece, text, depth)
            depth += same
            holders = child.holders
            if since:
                holders = {worker: stamp for worker, stamp in holders.items() if stamp >= since}
            held.update(dict.fromkeys(holders, depth))
            if same < len(piece):
                break
            node = child
        return held

    def insert(self, text: str, worker: str, now: float = 0.0) -> None:
        stamp = self._stamp = max(now, self._stamp + 1e-6)  # later is always more, whatever the clock's steps
        ends = self._ends[worker]
        node, depth, length = self._root, 0, len(text)
        while depth < length:
            child = node.children.get(text[depth])
            if child is None:
                child = TextNode(text[depth:], node, {})
                node.children[text[depth]] = child
            elif not text.startswith(child.text, depth):
                child = self._split(child, common_length(child.text, text, depth))
            if worker not in child.holders:
                self._sizes[worker] = self._sizes.get(worker, 0) + len(child.text)
                self._counts[worker] = self._counts.get(worker, 0) + 1
            child.holders[worker] = stamp
            ends.pop(node, None)
            depth += len(child.text)
            node = child
        if node is not self._root and not (node.children and held_below(node, worker)):
            ends[node] = None
            ends.move_to_end(node)

    def _split(self, node: TextNode, at: int) -> TextNode:
        """Cuts a node in two and returns the upper one."""
        parent = node.parent
        assert parent is not None
        upper = TextNode(node.text[:at], parent, dict(node.holders), {node.text[at]: node})
        parent.children[upper.text[0]] = upper
        node.text, node.parent = node.text[at:], upper
        for worker in upper.holders:
            self._counts[worker] += 1
        return upper

    def evict(self, most_chars: int) -> None:
        """Shrinks every worker."""
        for worker in self._sizes:
            self.shrink(worker, most_chars)

    def remove(self, worker: str) -> None:
        self.shrink(worker, 0)
        self._sizes.pop(worker, None)
        self._counts.pop(worker, None)
        self._ends.pop(worker, None)

    def shrink(self, worker: str, most_chars: int) -> None:
        """Removes the oldest texts of one worker, if it holds too many characters or nodes."""
        ends = self._ends.get(worker)
        while ends and (self._sizes[worker] > most_chars or self._counts[worker] > self._most_nodes):
            node, _ = ends.popitem(last=False)
            parent = node.parent
            assert parent is not None
            del node.holders[worker]
            self._sizes[worker] -= len(node.text)
            self._counts[worker] -= 1
            if not node.holders:
                del parent.children[node.text[0]]
            if parent is not self._root and not held_below(parent, worker):
                ends[parent] = None  # behind the others: what several texts begin with is worth more than one of them


def held_below(node: TextNode, worker: str) -> bool:
    return any(worker in child.holders for child in node.children.values())
