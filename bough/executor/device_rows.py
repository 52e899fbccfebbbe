"""The rows of a CPU executor: the host's mirror is the table itself, and tensors are views of its arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bough.attention.batch import AttentionBatch
from bough.core.plan import BatchPlan, IntArray, Limits
from bough.executor.layout import RowMirror, has_drafts


class DeviceRows:
    """Owns what the device knows of each row; `apply` takes a plan in, `advance` notes what was sampled."""

    def __init__(self, limits: Limits) -> None:
        self._mirror = RowMirror(limits)
        self._page_size = limits.page_size
        self._page_tables = tuple(torch.from_numpy(self._mirror.pages))
        self._last_tokens = np.zeros(limits.rows, dtype=np.int64)

    def apply(self, plan: BatchPlan) -> tuple[torch.Tensor, AttentionBatch]:
        """Brings the rows up to date and returns the step's token ids with where everything stands."""
        layout = self._mirror.apply(plan)
        ids = layout.token_ids
        ids[layout.from_device] = self._last_tokens[plan.rows[plan.given < plan.query_lens]]
        batch = AttentionBatch(
            rows=torch.from_numpy(layout.rows),
            lengths=torch.from_numpy(layout.lengths),
            # Decodes with drafts attend as prompts do.
            decodes=0 if has_drafts(plan) else int((plan.given < plan.query_lens).sum()),
            query_lens=layout.query_lens,
            query_starts=layout.query_starts,
            context_lens=layout.context_lens,
            page_tables=self._page_tables,
            slots=tuple(torch.from_numpy(layout.slots)),
            positions=torch.from_numpy(layout.positions),
            page_size=self._page_size,
        )
        return torch.from_numpy(ids), batch

    def advance(self, rows: IntArray, tokens: npt.NDArray[np.int64]) -> None:
        """Notes the tokens that these rows have just sampled: their next decode begins with them."""
        self._last_tokens[rows] = tokens

    def give_back(self, rows: IntArray, missing: IntArray) -> None:
        """So many drafts of these rows did not hold."""
        self._mirror.give_back(rows, missing)
