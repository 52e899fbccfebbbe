"""Which tokens of a step belong to which row, and where the rows' states are: what kernels of recurrent layers ask."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bough.core.plan import IntArray


class StateRows(NamedTuple):
    """Rows of a step, whose tokens stand back to back."""

    table: torch.Tensor  # [max_rows, any] int32, of each row the page of its state comes first
    rows: torch.Tensor  # [batch] int32
    query_starts: IntArray  # [batch + 1] on the host, for torch
    starts: torch.Tensor | None = None  # the same on the device, for kernels; None: each row has one token

    @property
    def pages(self) -> torch.Tensor:
        """[batch] int64"""
        return self.table[self.rows.long(), 0].long()
