"""Products of a few rows with a weight in plain torch, composed of the plain operations.

`config` is how an implementation that works in tiles is tuned; there are no tiles here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bough.kernels.activation.reference import gelu_tanh_mul, silu_mul
from bough.kernels.rms_norm.reference import rms_norm
from bough.kernels.skinny_linear.tiling import Tiling

ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


def skinny_linear(
    x: torch.Tensor,  # [rows, in], at most 16 rows
    weight: torch.Tensor,  # [out, in]
    bias: torch.Tensor | None = None,  # [out]
    *,
    out: torch.Tensor | None = None,  # [rows, out]
    config: Tiling | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, written to `out` if given."""
    result = F.linear(x, weight, bias)
    return result if out is None else out.copy_(result)


def skinny_norm_linear(
    x: torch.Tensor,  # [rows, in], at most 16 rows
    residual: torch.Tensor | None,  # like x
    norm_weight: torch.Tensor,  # [in]
    eps: float,
    plus_one: bool,
    weight: torch.Tensor,  # [out, in]
    bias: torch.Tensor | None = None,  # [out]
    *,
    config: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the norm of x + residual, and that sum, which is the next residual."""
    normed, stream = rms_norm(x, norm_weight, eps, residual, plus_one)
    return F.linear(normed, weight, bias), stream


def skinny_gate_up(
    x: torch.Tensor,  # [rows, in], at most 16 rows
    residual: torch.Tensor | None,  # like x
    norm_weight: torch.Tensor,  # [in]
    eps: float,
    plus_one: bool,
    weight: torch.Tensor,  # [2 * inner, in]: the gate's rows, then up's
    activation: str,  # "silu" or "gelu_tanh"
    *,
    config: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`activation(gate) * up` of the norm of x + residual, and that sum, which is the next residual."""
    normed, stream = rms_norm(x, norm_weight, eps, residual, plus_one)
    return ACTIVATIONS[activation](F.linear(normed, weight)), stream
