"""What the memory of a quantised weight stands for."""

from __future__ import annotations

import torch

from bough.kernels.experts import fp4
from bough.kernels.experts.fp4 import Fp4Rows
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.w4_linear import reference as w4
from bough.kernels.w4_linear.reference import W4Rows
from bough.layers.weights import WeightSlot


def held_values(slot: WeightSlot) -> torch.Tensor:
    """Of a slot that is filled, in float32."""
    inputs = slot.target.shape[1]
    if len(slot.held) == 3:
        return w4.dequantize(W4Rows(*slot.held), inputs, torch.float32)
    if slot.held[0].dtype == torch.int32:
        return fp4.dequantize(Fp4Rows(*slot.held), inputs)
    return QuantizedRows(*slot.held).dequantize()
