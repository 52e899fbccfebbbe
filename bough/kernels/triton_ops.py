"""The table of operations for GPUs. Matrix products of more than a few rows are left to torch's libraries."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bough.kernels.activation import triton as activation
from bough.kernels.norm_rope_store.triton import norm_rope_store_
from bough.kernels.ops import Ops
from bough.kernels.rms_norm.triton import rms_norm
from bough.kernels.skinny_linear.triton import skinny_linear

SKINNY_ROWS = 16  # up to here a product is bound by reading the weight, which libraries do less well


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias."""
    if x.shape[0] <= SKINNY_ROWS and x.dtype != torch.float32:
        return skinny_linear(x, weight, bias)
    return F.linear(x, weight, bias)


TRITON = Ops(
    linear=linear,
    rms_norm=rms_norm,
    silu_mul=activation.silu_mul,
    gelu_tanh_mul=activation.gelu_tanh_mul,
    norm_rope_store_=norm_rope_store_,
)
