"""Scaled products by torch's own, which multiplies 8-bit floats on tensor cores.

It takes sides that are multiples of 16 (`fits` tells), gives bfloat16, and needs a Hopper GPU or a later one: for older
devices torch has no product with a scale for each row.
"""

from __future__ import annotations

import torch

from bough.kernels.quantize_rows.reference import QuantizedRows

SIDE = 16


def fits(in_features: int, out_features: int) -> bool:
    """Whether torch can multiply a weight of this shape."""
    return in_features % SIDE == 0 and out_features % SIDE == 0


def scaled_linear(
    x: QuantizedRows,  # [rows, in]
    weight: QuantizedRows,  # [out, in]
    bias: torch.Tensor | None,  # [out]
    dtype: torch.dtype,  # of the result
) -> torch.Tensor:
    """`x @ weight.T + bias`."""
    product: torch.Tensor = torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=dtype,
        # Sums of a few inputs keep 14 bits before they join a float32: far more than the inputs have.
        use_fast_accum=True,
    )
    return product
