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
    ends_only: bool = False  # only each row's last token is looked at: what a back end gives for others may be anything


class AttentionBackend(Protocol):
    """Causal attention over a paged pool."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Takes the batch that the following `run` calls are about."""
        ...

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor:
        """Attends with q [tokens, heads, head_dim] and gives the same shape back, contiguous.

        The keys and values of all tokens of the step stand in the pool already; k and v [tokens, kv_heads, head_dim]
        are the same once more, side by side, for back ends that would rather not look them up. The three may be views
        of one tensor.
        """
        ...
