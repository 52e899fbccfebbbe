"""A bounded picture of a radix tree, for people who watch it. It changes nothing, and its cost does not grow with the
tree: the nodes used last come first, and no more than a few times `limit` are looked at.

A node is named by the clock's reading when its tokens came and by its first token's position: a split leaves the name
to the upper half, and no two nodes that came together begin at one position.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from bough.memory.tree.node import TOKEN, TOKEN_BYTES, Node
from bough.memory.tree.tree import RadixTree

LOOKED_AT = 2  # nodes per node that is shown
TEXT_TOKENS = 512  # of one node, at most

Seen = tuple[Node, int, int]  # a node, the number of its parent among those seen (-1: the root), its first position


def recent_nodes(root: Node, limit: int) -> Iterator[Seen]:
    """Up to `limit` nodes, those used last first; parents before children, because a use of a child is one of its
    parent's too."""
    heap: list[tuple[int, int, Node, int, int]] = []
    budget, number, place, node, end = LOOKED_AT * limit, 0, -1, root, 0
    while True:
        # A node may have more children than can be looked at; the last of them are the youngest.
        for child in islice(reversed(node.children.values()), budget):
            budget -= 1
            heapq.heappush(heap, (-child.last_used, budget, child, place, end))
        if not heap or number == limit:
            return
        _, _, node, parent, start = heapq.heappop(heap)
        yield node, parent, start
        place, number, end = number, number + 1, start + len(node.tokens) // TOKEN_BYTES


def snapshot(tree: RadixTree, limit: int, readers: Iterable[tuple[int, Node | None]] = ()) -> dict[str, Any]:
    """Columns with a figure of each node; times are readings of `clock`, which counts lookups and insertions. Of the
    first `limit` readers, requests by number with the last node that each has locked: the number, and where that node,
    or the nearest above it that is shown, stands in the columns (-1: none)."""
    seen = list(recent_nodes(tree.root, limit))
    places = {node: place for place, (node, _, _) in enumerate(seen)}
    held = []
    for number, node in islice(readers, limit):
        while node is not None and node not in places:
            node = node.parent
        held.append((number, -1 if node is None else places[node]))
    figures = {"created": "created", "used": "last_used", "hits": "hits", "locks": "locks"}
    return {
        "clock": tree.clock,
        "nodes": tree.node_count,
        "cached_tokens": tree.total_pages * tree.page_size,
        "parent": [parent for _, parent, _ in seen],
        "tokens": [len(node.tokens) // TOKEN_BYTES for node, _, _ in seen],
        "readers": held,
        **{name: [getattr(node, field) for node, _, _ in seen] for name, field in figures.items()},
    }


def tokens_of(tree: RadixTree, created: int, start: int, limit: int) -> list[int] | None:
    """The first tokens of one of the nodes that `snapshot` shows; None if it is not there any more."""
    for node, _, first in recent_nodes(tree.root, limit):
        if (node.created, first) == (created, start):
            ids: list[int] = np.frombuffer(node.tokens[: TEXT_TOKENS * TOKEN_BYTES], TOKEN).tolist()
            return ids
    return None
