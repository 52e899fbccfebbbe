"""The table of operations for GPUs. Matrix products of more than a few rows are left to torch."""

import torch
import torch.nn.functional as F

from bough.kernels.activation.triton import gated_mul
from bough.kernels.embedding.triton import embedding
from bough.kernels.experts.triton import MAX_TOKENS_NORMED, normed_experts, routed_experts
from bough.kernels.latent_attention.triton import latent_store_
from bough.kernels.lora.triton import lora_
from bough.kernels.norm_rope_store.triton import norm_rope_store_
from bough.kernels.ops import Activation, Experts, NormedSum, Ops, Router, WithNorm, WithSum
from bough.kernels.recurrence.triton import causal_conv_, recurrence_
from bough.kernels.rms_norm.triton import rms_norm
from bough.kernels.skinny_linear.triton import fused_worth, skinny_gate_up, skinny_linear, skinny_norm_linear, worth
from bough.kernels.sparse_index.triton import index_store_


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
    rms_norm=rms_norm,
    gated_mul=gated_mul,
    norm_rope_store_=norm_rope_store_,
    latent_store_=latent_store_,
    index_store_=index_store_,
    causal_conv_=causal_conv_,
    recurrence_=recurrence_,
    lora_=lora_,
    experts_by_logits=routed_experts,
)
