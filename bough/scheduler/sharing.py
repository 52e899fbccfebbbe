"""Which running requests read the same cached prefix: the order of a step's rows, and what neighbours have in common.

Rows stand in the order of the radix tree, so all that share a node are neighbours, at every depth. Executors read a
shared prefix once for all of them; where that is switched off, the device's cache serves repeated reads. The order of
decodes is worked out only when rows come, go or move in the tree.
"""

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree.node import TOKEN_BYTES, Node, path_to
from bough.scheduler.assembly import Chunk
from bough.scheduler.rows import RowIndex
from bough.scheduler.running_batch import RunningBatch


class Sharing:
    """Owns the arrangement of the last step's decodes."""

    def __init__(self, batch: RunningBatch, *, enabled: bool) -> None:
        self._batch = batch
        self._enabled = enabled
        self._key: tuple[int, bytes] | None = None
        self._arranged: tuple[RowIndex, IntArray | None]
        self._in_common = 0  # of the last step
        self.read = self.shared = 0  # tokens that decodes have read, and those that a neighbour read too

    def arrange(self, rows: RowIndex) -> tuple[RowIndex, IntArray | None]:
        """The same rows in the order of the tree, and how many first tokens each has in common with the one before it;
        None: nobody has any."""
        self.read += int(self._batch.table.length[rows].sum())
        if not self._batch.cache.share or len(rows) < 2:
            return rows, None
        key = (self._batch.moves, rows.tobytes())
        if key != self._key:
            # A row that was rewound still locks the node that it has left.
            order, common = self._arrange(rows, self._batch.table.tree_pages[rows])
            self._key, self._arranged = key, (rows[order], common)
            self._in_common = 0 if common is None else int(common.sum())
        self.shared += self._in_common
        return self._arranged

    def arrange_chunks(self, chunks: list[Chunk]) -> tuple[list[Chunk], IntArray | None]:
        """The same for chunks of prompts, which stand behind the decodes; the first has nothing in common with them. Of
        what stands in the tree already, a chunk of this very step may have to compute some."""
        if not self._batch.cache.share or len(chunks) < 2:
            return chunks, None
        firsts = np.array([chunk.first for chunk in chunks])
        order, common = self._arrange(np.array([c.request.row for c in chunks]), firsts // self._batch.page_size)
        return [chunks[place] for place in order], common

    def _arrange(self, rows: RowIndex, cached: IntArray) -> tuple[list[int], IntArray | None]:
        """`cached` pages of each may be shared."""
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
        held = cached[order] * self._batch.page_size
        common[1:] = np.minimum(common[1:], np.minimum(held[1:], held[:-1]))
        return order, common if self._enabled and common.any() else None
