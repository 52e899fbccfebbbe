"""Sparse latent attention on GPUs: each token's query reads a list of slots that was chosen for it.

To the attention kernels a list is a line of a page table whose pages have one token, so a token of a prompt is a row
like a decode. Owns the lists of the current step, which layers that choose none share, and what is worked out once a
step.
"""

from __future__ import annotations

import torch

from bough.attention.base import IndexQueries, LatentSpec
from bough.attention.batch import AttentionBatch
from bough.kernels.sparse_index.triton import MAX_SCORES, choose_slots
from bough.memory.pools.kv_pool import KVPool


def scratch_bytes(context: int) -> int:
    """What scores take where rows may be so long."""
    return max(MAX_SCORES, context) * 4


class SparseLatents:
    """The lists of a step's tokens."""

    def __init__(self) -> None:
        self._tokens: tuple[torch.Tensor, ...] | None = None
        self._slots: torch.Tensor | None = None

    def prepare(self) -> None:
        """Forgets the step before."""
        self._tokens = self._slots = None

    def choose(
        self,
        index: IndexQueries | None,
        layer: LatentSpec,
        pool: KVPool,
        batch: AttentionBatch,
        query_starts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The list of each token [tokens, top] int32, and how long it is. `query_starts` [batch + 1] stands on the
        device; without it all rows are decodes."""
        top = layer.top
        assert top is not None
        if self._tokens is None:
            lengths = (batch.positions + 1).int()
            self._tokens = _rows_of_tokens(batch, query_starts), lengths, lengths.clamp(max=top)
        rows, lengths, counts = self._tokens
        if index is not None:
            keys, table = pool.index_keys[layer.layer], batch.page_tables[layer.group]
            self._slots = choose_slots(*index, keys, table, rows, lengths, top, page_size=batch.page_size)
        assert self._slots is not None, "the first layer has no other whose choice it could share"
        return self._slots, counts


def _rows_of_tokens(batch: AttentionBatch, query_starts: torch.Tensor | None) -> torch.Tensor:
    """The line of the page table that each token's row has. Padding behind the last row is given to any: its position
    is 0, which every row has."""
    if query_starts is None:
        return batch.rows.int()
    ends = query_starts[1:].cummax(0).values  # padded with zeros
    token = torch.arange(len(batch.positions), dtype=ends.dtype, device=ends.device)
    place = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
    return batch.rows[place].int()
