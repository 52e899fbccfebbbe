"""The seam between layers and attention back ends.

A back end is prepared once a step, outside the forward pass (so that a captured graph need not contain it), and then
run once for each layer. It owns what it derives from the batch; the cache belongs to the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from bough.attention.batch import AttentionBatch
from bough.memory.pools.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What is constant about one layer's attention on this rank."""

    layer: int  # index into the pool
    scale: float
    window: int | None  # tokens a query sees, its own included; None: all
    softcap: float | None  # scores become softcap * tanh(score / softcap)
    heads: int
    kv_heads: int
    head_dim: int


class AttentionBackend(Protocol):
    """Causal attention over a paged pool."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Takes the batch that the following `run` calls are about."""
        ...

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor:
        """Attends with q [tokens, heads, head_dim] and gives the same shape back.

        Stores k and v [tokens, kv_heads, head_dim] of *all* tokens before any of them attends: a row may read pages
        that another row of the same step writes (see `bough.core.plan`).
        """
        ...
