"""What the device knows of each row: its page table, its length, its last sampled token.

Plans bring only changes. On a CPU the arrays are numpy views of torch tensors, so that address arithmetic needs no
torch calls, each of which costs more than the arithmetic itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bough.attention.batch import AttentionBatch
from bough.core.plan import BatchPlan, IntArray, Limits


class DeviceRows:
    """Owns the per-row state; `apply` takes a plan in, `advance` notes what was sampled."""

    def __init__(self, limits: Limits) -> None:
        self._page_size = limits.page_size
        max_pages = -(-limits.context_length // limits.page_size)
        self._pages = np.zeros((limits.rows, max_pages), dtype=np.int32)
        self._page_counts = np.zeros(limits.rows, dtype=np.int32)
        self._lengths = np.zeros(limits.rows, dtype=np.int32)
        self._last_tokens = np.zeros(limits.rows, dtype=np.int64)
        self._page_table = torch.from_numpy(self._pages)

    def apply(self, plan: BatchPlan) -> tuple[torch.Tensor, AttentionBatch]:
        """Brings the rows up to date and returns the step's token ids with where everything stands."""
        for setup in plan.setups:
            (pages,) = setup.pages
            self._pages[setup.row, : len(pages)] = pages
            self._page_counts[setup.row] = len(pages)
            self._lengths[setup.row] = setup.length
        for edit in plan.edits:
            self._pages[edit.row, edit.first : edit.first + len(edit.pages)] = edit.pages
        self._append_pages(plan.rows, plan.new_pages[0], plan.new_page_counts[0])

        context_lens = self._lengths[plan.rows]
        starts = np.zeros(len(plan.rows) + 1, dtype=np.int32)
        np.cumsum(plan.query_lens, out=starts[1:])
        rows, positions = _spread(plan.rows, plan.query_lens, starts, context_lens)
        slots = self._pages[rows, positions // self._page_size].astype(np.int64)
        slots = slots * self._page_size + positions % self._page_size
        self._lengths[plan.rows] += plan.query_lens
        batch = AttentionBatch(
            rows=torch.from_numpy(plan.rows.astype(np.int64)),
            query_lens=plan.query_lens,
            query_starts=starts,
            context_lens=context_lens,
            page_table=self._page_table,
            slots=torch.from_numpy(slots),
            positions=torch.from_numpy(positions),
            page_size=self._page_size,
        )
        return torch.from_numpy(self._token_ids(plan, starts)), batch

    def advance(self, rows: IntArray, tokens: npt.NDArray[np.int64]) -> None:
        """Notes the tokens that these rows have just sampled: their next decode begins with them."""
        self._last_tokens[rows] = tokens

    def _append_pages(self, rows: IntArray, pages: IntArray, counts: IntArray) -> None:
        if not len(pages):
            return
        receivers = np.repeat(rows, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        places = self._page_counts[receivers] + (np.arange(len(pages)) - first)
        self._pages[receivers, places] = pages
        self._page_counts[rows] += counts

    def _token_ids(self, plan: BatchPlan, starts: IntArray) -> npt.NDArray[np.int64]:
        """Given tokens in their places; a row with fewer than it computes begins with its last sampled token."""
        total = int(starts[-1])
        ids = np.zeros(total, dtype=np.int64)
        from_device = plan.given < plan.query_lens
        firsts = starts[:-1][from_device]
        is_given = np.ones(total, dtype=np.bool_)
        is_given[firsts] = False
        ids[is_given] = plan.tokens
        ids[firsts] = self._last_tokens[plan.rows[from_device]]
        return ids


def _spread(
    rows: IntArray, query_lens: IntArray, starts: IntArray, context_lens: IntArray
) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """For each token of the step, its row and its position in the row's sequence."""
    offsets = np.arange(int(starts[-1]), dtype=np.int64) - np.repeat(starts[:-1], query_lens)
    return np.repeat(rows, query_lens), np.repeat(context_lens, query_lens) + offsets
