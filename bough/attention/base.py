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
    group: int = 0  # of the layer's keys and values: which page table and which slots are its own
    ends_only: bool = False  # only each row's last token is looked at: what a back end gives for others may be anything
    sinks: torch.Tensor | None = None  # [heads] a logit that joins each softmax and has no value; torch's back end only

    @property
    def writes_scores(self) -> bool:
        """Whether scores are computed one by one, because no library has the layer's kind of softmax."""
        return self.softcap is not None or self.sinks is not None


@dataclass(frozen=True, slots=True)
class QKNormRope:
    """What is done to the query and key heads of one layer before they attend: a norm, if they have one, and the
    rotation by their positions."""

    query_weight: torch.Tensor | None  # [head_dim]
    key_weight: torch.Tensor | None  # [head_dim]
    eps: float
    plus_one: bool  # the norms multiply with 1 + weight
    cos: torch.Tensor  # [context, head_dim / 2] float32
    sin: torch.Tensor  # [context, head_dim / 2] float32


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

    def run_projected(
        self, qkv: torch.Tensor, qk_norm_rope: QKNormRope, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor | None:
        """All that stands between the projection and the output at once: QK norm and RoPE of qkv [tokens, heads +
        2 * kv_heads, head_dim], storing keys and values, and attention. None where that has no kernel of its own;
        nothing is done then, and the caller takes one step after the other."""
        return None
