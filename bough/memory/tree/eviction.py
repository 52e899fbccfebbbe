"""Who goes first when pages run out: policies as pure functions, and the queue that finds the best victim.

A policy maps what is known of a leaf to its rank; the leaf with the lowest rank goes first. Times are readings of the
tree's logical clock, so the same calls always choose the same victims.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import TypeAlias

from bough.memory.tree.node import Node

Rank: TypeAlias = tuple[int, ...]
Policy: TypeAlias = Callable[[Node], Rank]
POLICIES: dict[str, Policy] = {
    "lru": lambda leaf: (leaf.last_used,),
    "lfu": lambda leaf: (leaf.hits, leaf.last_used),
    # Segmented: what was hit at least twice outlives all that was not.
    "slru": lambda leaf: (int(leaf.hits >= 2), leaf.last_used),
    "fifo": lambda leaf: (leaf.created,),
    "mru": lambda leaf: (-leaf.last_used,),  # right for cyclic scans that are longer than the cache
    "priority": lambda leaf: (leaf.priority, leaf.last_used),
}


class VictimQueue:
    """Finds the evictable leaf of the lowest rank, without ever scanning the tree.

    Becoming an evictable leaf, or being used as one, pushes an entry on a heap. An entry that a newer one of the same
    node has overtaken is known by its ticket, and skipped when it surfaces; so is one whose node got locked or grew
    children, and that node is offered again when it is unlocked or loses its last child. So an eviction costs
    O(victims log leaves), for any policy, also one whose ranks fall with use (mru).

    No two leaves tie: only nodes of one path share a reading of the clock, and a path has one leaf.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, int, Node]] = []
        self._last_ticket = 0
        self._valid = 0  # heap entries whose node still holds their ticket

    def offer(self, node: Node) -> None:
        """Says that `node` may have become an evictable leaf, or that its rank may have changed."""
        if not node.evictable:
            return
        self._last_ticket += 1
        self._valid += node.ticket == 0
        node.ticket = self._last_ticket
        heapq.heappush(self._heap, (self._policy(node), node.ticket, node))
        # Overtaken entries may sink to the bottom (mru) and would pile up there: drop them once they are the majority.
        if len(self._heap) > 2 * self._valid + 64:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """Takes out the best victim; the caller removes it from the tree or offers it again."""
        while self._heap:
            _, ticket, node = heapq.heappop(self._heap)
            if node.ticket != ticket:
                continue
            node.ticket = 0
            self._valid -= 1
            if node.evictable:
                return node
        return None

    def clear(self) -> None:
        """Forgets all nodes."""
        for _, _, node in self._heap:
            node.ticket = 0
        self._heap.clear()
        self._valid = 0

    def check(self, nodes: Iterable[Node]) -> list[str]:
        """Discrepancies between the queue and `nodes`, all of the tree; empty when all is well."""
        problems: list[str] = []
        tickets = {ticket for _, ticket, node in self._heap if node.ticket == ticket}
        if len(tickets) != self._valid:
            problems.append(f"victims: {self._valid} valid entries on the books, {len(tickets)} counted")
        lost = sum(1 for node in nodes if node.evictable and node.ticket not in tickets)
        if lost:
            problems.append(f"victims: {lost} evictable leaves would never be found")
        return problems
