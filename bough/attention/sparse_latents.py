"""Sparse latent attention on GPUs: each token's query reads a list of slots that was chosen for it.

To the attention kernels a list is a line of a page table whose pages have one token, so a token of a prompt is a row
like a decode. Owns the lists of the current step, which layers that choose none share, and what is worked out once a
step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bough.attention.base import IndexQueries, LatentSpec
from bough.attention.batch import AttentionBatch
from bough.kernels.sparse_index.triton import MAX_SCORES, choose_slots
from bough.memory.pools.kv_pool import KVPool


def scratch_bytes(context: int) -> int:
    """What scores take where rows may be so long."""
    return max(MAX_SCORES, context) * 4


class Lists(NamedTuple):
    """What the tokens of a step read, as rows of a page table."""

    slots: torch.Tensor  # [tokens, top] int32
    lengths: torch.Tensor  # [tokens] int32
    places: torch.Tensor  # [tokens + 1] int32, counting up


class SparseLatents:
    """The lists of the current step."""

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
    ) -> Lists:
        """`query_starts` [batch + 1] stands on the device; without it all rows are decodes."""
        top = layer.top
        assert top is not None
        if self._tokens is None:
            lengths = (batch.positions + 1).int()
            places = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
            rows = batch.rows.int() if query_starts is None else _rows_of_tokens(batch, query_starts, places[:-1])
            self._tokens = rows, lengths, lengths.clamp(max=top), places
        rows, lengths, counts, places = self._tokens
        if index is not None:
            keys, table = pool.index_keys[layer.layer], batch.page_tables[layer.group]
            self._slots = choose_slots(*index, keys, table, rows, lengths, top, page_size=batch.page_size)
        assert self._slots is not None, "the first layer has no other whose choice it could share"
        return Lists(self._slots, counts, places)


def _rows_of_tokens(batch: AttentionBatch, query_starts: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The line of the page table that each token's row has. Padding behind the last row is given to any: its position
    is 0, which every row has."""
    ends = query_starts[1:].cummax(0).values  # padded with zeros
    place = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
    return batch.rows[place].int()
