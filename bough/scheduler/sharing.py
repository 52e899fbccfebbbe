"""Which running requests read the same cached prefix: the order of decodes, and what neighbours have in common.

Rows stand in the order of the radix tree, so all that share a node are neighbours, at every depth. Executors read a
shared prefix once for all of them. The order is worked out only when rows come, go or move in the tree.
"""

from __future__ import annotations

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree.node import TOKEN_BYTES, Node, path_to
from bough.scheduler.rows import RowIndex
from bough.scheduler.running_batch import RunningBatch


class Sharing:
    """Owns the arrangement of the last step."""

    def __init__(self, batch: RunningBatch, *, enabled: bool) -> None:
        self._batch = batch
        self._enabled = enabled and batch.cache.share
        self._key: tuple[int, bytes] | None = None
        self._arranged: tuple[RowIndex, IntArray | None]
        self._in_common = 0  # of the last step
        self.read = self.shared = 0  # tokens that decodes have read, and those that a neighbour read too

    def arrange(self, rows: RowIndex) -> tuple[RowIndex, IntArray | None]:
        """The same rows in the order of the tree, and how many first tokens each has in common with the one before it;
        None: nobody has any."""
        self.read += int(self._batch.table.length[rows].sum())
        if not self._enabled or len(rows) < 2:
            return rows, None
        key = (self._batch.moves, rows.tobytes())
        if key != self._key:
            self._key, self._arranged = key, self._arrange(rows)
            common = self._arranged[1]
            self._in_common = 0 if common is None else int(common.sum())
        self.shared += self._in_common
        return self._arranged

    def _arrange(self, rows: RowIndex) -> tuple[RowIndex, IntArray | None]:
        table, numbers = self._batch.table, dict[Node, int]()
        nodes = (path_to(table.request_in(row).node) for row in rows.tolist())
        paths = [[numbers.setdefault(node, len(numbers)) for node in path] for path in nodes]
        order = sorted(range(len(rows)), key=paths.__getitem__)
        lengths = [len(node.tokens) // TOKEN_BYTES for node in numbers]
        common = np.zeros(len(rows), dtype=np.int32)
        for place in range(1, len(order)):
            for own, before in zip(paths[order[place]], paths[order[place - 1]], strict=False):
                if own != before:
                    break
                common[place] += lengths[own]
        return rows[order], common if common.any() else None
