"""Scaled products by giving both sides back their scales first: exact but for the rounding at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bough.kernels.quantize_rows.reference import QuantizedRows


def scaled_linear(
    x: QuantizedRows,  # [rows, in]
    weight: QuantizedRows,  # [out, in]
    bias: torch.Tensor | None,  # [out]
    dtype: torch.dtype,  # of the result
) -> torch.Tensor:
    """`x @ weight.T + bias`."""
    product = F.linear(x.values.float(), weight.values.float()) * x.scales * weight.scales.T
    return (product if bias is None else product + bias).to(dtype)
