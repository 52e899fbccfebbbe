"""The tables of operations for GPUs. Matrix products of more than a few rows are left to torch.

For deterministic inference a token's bits do not depend on how many are computed. Products are Triton's own, with an
order of sums that is fixed by the weight; nothing is fused into them, because fused kernels serve few rows only. The
other kernels sum within a row too; they are given the same cut for any number of rows.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bough.kernels.activation import triton as gate_kernel
from bough.kernels.embedding.triton import embedding
from bough.kernels.experts.triton import MAX_TOKENS_NORMED, normed_experts, routed_experts
from bough.kernels.invariant_linear.triton import invariant_linear
from bough.kernels.latent_attention.triton import latent_store_
from bough.kernels.lora.triton import lora_
from bough.kernels.norm_rope_store import triton as heads_kernel
from bough.kernels.ops import Activation, Experts, NormedSum, Ops, Router, WithNorm, WithSum
from bough.kernels.recurrence.triton import causal_conv_, recurrence_, recurrence_by_tokens_
from bough.kernels.rms_norm import triton as norm_kernel
from bough.kernels.skinny_linear.triton import fused_worth, skinny_gate_up, skinny_linear, skinny_norm_linear, worth
from bough.kernels.sparse_index.triton import index_store_

ANY_ROWS = 128  # what the kernels' cuts are chosen for, however many rows there are


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias."""
    if x.dtype != torch.float32 and worth(x.shape[0], *weight.shape):
        return skinny_linear(x, weight, bias)
    return F.linear(x, weight, bias)


class TritonOps(Ops):
    """Fuses norms into the products behind them where so few rows are computed that it was measured to pay."""

    __slots__ = ()

    def norm_linear(self, inputs: NormedSum, weight: torch.Tensor, bias: torch.Tensor | None) -> WithSum:
        x, residual, norm = inputs
        if x.dtype != torch.float32 and fused_worth(x.shape[0], *weight.shape):
            return skinny_norm_linear(x, residual, *norm, weight, bias)
        return Ops.norm_linear(self, inputs, weight, bias)

    def norm_gate_up(
        self, inputs: NormedSum, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> WithSum:
        x, residual, norm = inputs
        if bias is None and x.dtype != torch.float32 and fused_worth(x.shape[0], *weight.shape):
            return skinny_gate_up(x, residual, *norm, weight, activation)
        return Ops.norm_gate_up(self, inputs, weight, bias, activation)

    def router_logits(self, x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and x.dtype != torch.float32 and torch.version.hip is None:
            return torch.mm(x, router.t(), out_dtype=torch.float32)
        return Ops.router_logits(self, x, router)

    def normed_experts(self, inputs: NormedSum, router: Router, experts: Experts) -> WithNorm:
        if inputs.x.shape[0] <= MAX_TOKENS_NORMED:
            return normed_experts(*inputs, router, *experts)
        return Ops.normed_experts(self, inputs, router, experts)


TRITON = TritonOps(
    embedding=embedding,
    linear=linear,
    rms_norm=norm_kernel.rms_norm,
    gated_mul=gate_kernel.gated_mul,
    norm_rope_store_=heads_kernel.norm_rope_store_,
    latent_store_=latent_store_,
    index_store_=index_store_,
    causal_conv_=causal_conv_,
    recurrence_=recurrence_,
    lora_=lora_,
    experts_by_logits=routed_experts,
)


def invariant_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum."""
    tiling = norm_kernel.config_for(ANY_ROWS, x.shape[-1])
    return norm_kernel.rms_norm(x, weight, eps, residual, plus_one, config=tiling)


def invariant_store_(qkv: torch.Tensor, heads: int, kv_heads: int, *rest: Any) -> None:
    """All between the projection and attention."""
    tiling = heads_kernel.config_for(ANY_ROWS, heads, kv_heads, qkv.shape[2])
    heads_kernel.norm_rope_store_(qkv, heads, kv_heads, *rest, config=tiling)


def invariant_gate(x: torch.Tensor, activation: str) -> torch.Tensor:
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
    rms_norm=invariant_norm,
    gated_mul=invariant_gate,
    norm_rope_store_=invariant_store_,
    latent_store_=latent_store_,
    index_store_=index_store_,
    causal_conv_=causal_conv_,
    recurrence_=recurrence_by_tokens_,
    experts_by_logits=partial(routed_experts, invariant=True),
)
