"""Gated activations in plain torch: the first half of the last dimension gates the second."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of x = [..., gate | up]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` of x = [..., gate | up], with GELU's tanh approximation."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
