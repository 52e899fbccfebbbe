"""Mixtures of experts in plain torch: one expert after the other, each with the tokens that were sent to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bough.kernels.activation.reference import gelu_tanh_mul, silu_mul


def experts(
    x: torch.Tensor,  # [tokens, hidden]
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]: the gate's rows, then up's
    down: torch.Tensor,  # [experts, hidden, inner]
    ids: torch.Tensor,  # [tokens, per_token] int32, all different within a token
    weights: torch.Tensor,  # [tokens, per_token] float32
    activation: str,
) -> torch.Tensor:
    """The weighted sum of each token's experts, summed in the type of the weights."""
    gate = silu_mul if activation == "silu" else gelu_tanh_mul
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in set(ids.flatten().tolist()):
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        inner = gate(F.linear(x[tokens], gate_up[expert]))
        out.index_add_(0, tokens, F.linear(inner, down[expert]).to(weights.dtype) * weights[tokens, slots, None])
    return out.to(x.dtype)
