"""What a forward pass needs beside weights and tokens. It is passed as an argument: nothing is global."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch
from bough.memory.pools.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step. Whoever builds it has already called `attention.prepare(batch)`."""

    attention: AttentionBackend
    pool: KVPool
    batch: AttentionBatch
    logits_indices: torch.Tensor | None = (
        None  # [n] last tokens of rows, whose hidden states alone are asked for; None: all
    )
    # The hidden states before some layers, for a draft model that reads them: by layer, each put in place of None.
    tapped: dict[int, torch.Tensor | None] | None = None
