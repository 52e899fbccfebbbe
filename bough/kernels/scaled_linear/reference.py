"""Scaled products by giving both sides back their scales first: exact but for the rounding at the end."""

import torch
import torch.nn.functional as F

from bough.kernels.quantize_rows.reference import QuantizedRows

SIDE = 16
FEW_ROWS = 16  # up to which rows of 16 bits are multiplied with a weight in groups, which takes as long as to read it
FEWEST_ROWS = 2  # the same of a weight with a scale for each output; libraries' products of more rows are faster


def fits(in_features: int, out_features: int) -> bool:
    """Whether torch can multiply a weight of this shape that has a scale for each output."""
    return in_features % SIDE == 0 and out_features % SIDE == 0


def scaled_linear(
    x: QuantizedRows,  # [rows, in]
    weight: QuantizedRows,  # [out, in]
    bias: torch.Tensor | None,  # [out]
    dtype: torch.dtype,  # of the result
) -> torch.Tensor:
    """`x @ weight.T + bias`."""
    product = F.linear(x.dequantize(), weight.dequantize())
    return (product if bias is None else product + bias).to(dtype)


def weight_linear(
    x: torch.Tensor,  # [rows, in]
    weight: QuantizedRows,  # [out, in]
    bias: torch.Tensor | None,  # [out]
) -> torch.Tensor:
    """The same for at most `FEW_ROWS` rows that are not quantised."""
    return F.linear(x, weight.dequantize().to(x.dtype), bias)
