"""The table of operations for deterministic inference on GPUs: a token's bits do not depend on how many are computed.

Products are Triton's own, with an order of sums that is fixed by the weight; nothing is fused into them, because fused
kernels serve few rows only. The other kernels sum within a row too; they are given the same cut for any number of rows.
"""

from functools import partial
from typing import Any

import torch

from bough.kernels.activation import triton as gate_kernel
from bough.kernels.embedding.triton import embedding
from bough.kernels.experts.triton import routed_experts
from bough.kernels.invariant_linear.triton import invariant_linear
from bough.kernels.latent_attention.triton import latent_store_
from bough.kernels.norm_rope_store import triton as heads_kernel
from bough.kernels.ops import Ops
from bough.kernels.recurrence.triton import causal_conv_, recurrence_by_tokens_
from bough.kernels.rms_norm import triton as norm_kernel
from bough.kernels.sparse_index.triton import index_store_

ANY_ROWS = 128  # what the kernels' cuts are chosen for, however many rows there are


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum."""
    tiling = norm_kernel.config_for(ANY_ROWS, x.shape[-1])
    return norm_kernel.rms_norm(x, weight, eps, residual, plus_one, config=tiling)


def norm_rope_store_(qkv: torch.Tensor, heads: int, kv_heads: int, *rest: Any) -> None:
    """All between the projection and attention."""
    tiling = heads_kernel.config_for(ANY_ROWS, heads, kv_heads, qkv.shape[2])
    heads_kernel.norm_rope_store_(qkv, heads, kv_heads, *rest, config=tiling)


def gated_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up` of x = [..., gate | up]."""
    return gate_kernel.gated_mul(x, activation, config=gate_kernel.config_for(ANY_ROWS, x.shape[-1] // 2))


class InvariantOps(Ops):
    """Logits stay in float32: a row with penalties needs them so, and its neighbours' type must not depend on it."""

    __slots__ = ()

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return invariant_linear(hidden, weight, out_dtype=torch.float32)

    def router_logits(self, x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        return invariant_linear(x, router, out_dtype=torch.float32)


INVARIANT = InvariantOps(
    embedding=embedding,
    linear=invariant_linear,
    rms_norm=rms_norm,
    gated_mul=gated_mul,
    norm_rope_store_=norm_rope_store_,
    latent_store_=latent_store_,
    index_store_=index_store_,
    causal_conv_=causal_conv_,
    recurrence_=recurrence_by_tokens_,
    experts_by_logits=partial(routed_experts, invariant=True),
)
