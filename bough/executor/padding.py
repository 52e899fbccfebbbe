"""A prompt without effect: to measure a step, or to have its kernels compiled."""

from __future__ import annotations

import numpy as np
import torch

from bough.attention.batch import AttentionBatch


def padding_batch(
    tokens: int, context_length: int, page_size: int, device: torch.device, groups: int = 1
) -> AttentionBatch:
    """One row of so many new tokens, all of which are written to page 0 of each group, that no request is given."""
    return AttentionBatch(
        rows=torch.zeros(1, dtype=torch.int32, device=device),
        lengths=torch.full((1,), tokens, dtype=torch.int32, device=device),
        decodes=0,
        query_lens=np.array([tokens], dtype=np.int32),
        query_starts=np.array([0, tokens], dtype=np.int32),
        context_lens=np.zeros(1, dtype=np.int32),
        page_tables=(torch.zeros((1, -(-tokens // page_size)), dtype=torch.int32, device=device),) * groups,
        slots=(torch.zeros(tokens, dtype=torch.int64, device=device),) * groups,
        positions=torch.arange(tokens, device=device) % context_length,
        page_size=page_size,
    )
