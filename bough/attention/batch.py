"""One step as a back end sees it: which rows compute how many tokens, and where their keys and values stand.

The executor builds it from a `BatchPlan` and its own device state. Arrays that shape the work (how many, how long) are
on the host; those that address memory are on the device. With steps in flight on a GPU the host arrays may be a step
old where only the device knows a length: a back end there takes lengths from the device and uses these as bounds. On a
CPU they are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bough.core.plan import IntArray
from bough.kernels.recurrence.reference import StateRows

if TYPE_CHECKING:  # needs Triton
    from bough.kernels.decode_attention.shared import SharedWork


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Where the rows of a step that compute more than decodes do stand, on the device."""

    query_starts: torch.Tensor  # [batch + 1] int32
    context_lens: torch.Tensor  # [batch] int32
    blocks: torch.Tensor  # [blocks, 2] int32, of `query_blocks`; a negative place stands for no block
    ends: torch.Tensor  # [chunks, 2] int32, those of them with a row's last query
    together: torch.Tensor | None = None  # [blocks, 4] int32, of `blocks_together`; None: each row reads by itself


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Rows of a step, back to back in the token dimension."""

    rows: torch.Tensor  # [batch] int32, indices into the page tables
    lengths: torch.Tensor  # [batch] int32, keys that the row's last query sees, its own included
    decodes: int  # the first so many rows compute one token each; of a captured step those whose length is not 0
    query_lens: IntArray  # [batch] tokens each row computes, at least 1
    query_starts: IntArray  # [batch + 1] where each row's tokens begin
    context_lens: IntArray  # [batch] tokens of the row in the cache before this step
    # Of each KV group: [max_rows, max_pages] int32. Of states, the last, a row's page stands first in its line.
    page_tables: tuple[torch.Tensor, ...]
    # Of each KV group, where each new token's key and value go: page * page_size + offset. [tokens] int64
    slots: tuple[torch.Tensor, ...]
    positions: torch.Tensor  # [tokens] int64, by which they rotate; or [3, tokens]
    page_size: int
    few_keys: bool = False  # decodes alone, and few, over few keys in all: as the host knows it, or captured for such
    columns: int = 0  # decodes of a column, where rows have tokens in several at one position after the other
    shared: SharedWork | None = None  # what decodes read together; the rest of each begins at its `own_first`
    # On the device, `query_starts` of steps with more than decodes; of a captured one, behind its rows 0.
    starts: torch.Tensor | None = None  # [batch + 1] int32
    both_ways: IntArray | None = None  # [runs, 2] first token and count: these attend to each other, ahead as well
    common: IntArray | None = None  # [batch] first keys on the same pages as those of the row before it
    drafted: int = 0  # the first so many rows have drafts among their tokens
    chunks: ChunkPlaces | None = None  # of a captured step, which brings them in buffers of its own

    @property
    def states(self) -> StateRows:
        """Where recurrent layers find the states of the rows."""
        return StateRows(self.page_tables[-1], self.rows, self.query_starts, self.starts, self.drafted)


def decodes_of(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    slots: tuple[torch.Tensor, ...],
    page_tables: tuple[torch.Tensor, ...],
    page_size: int,
    context_lens: IntArray | None = None,
    **more: Any,
) -> AttentionBatch:
    """A token each; without context lengths for kernels that take `lengths`."""
    ones, starts = np.ones(len(rows), dtype=np.int32), np.arange(len(rows) + 1, dtype=np.int32)
    host = ones, starts, ones if context_lens is None else context_lens
    return AttentionBatch(rows, lengths, len(rows), *host, page_tables, slots, positions, page_size, **more)
