"""The product in plain torch: what the fast kernel is compared with. It makes no promise about bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def invariant_linear(
    x: torch.Tensor,  # [rows, inputs]
    weight: torch.Tensor,  # [outputs, inputs]
    bias: torch.Tensor | None = None,  # [outputs]
    *,
    out_dtype: torch.dtype | None = None,  # that of x when left out
    config: object | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias. [rows, outputs]"""
    return F.linear(x, weight, bias).to(out_dtype or x.dtype)
