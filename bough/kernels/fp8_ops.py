"""The operations of layers with 8-bit weights, as one table chosen by device, beside that of `ops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bough.kernels.quantize_rows import reference as quantize
from bough.kernels.quantize_rows.rows import QuantizedRows
from bough.kernels.scaled_linear.reference import scaled_linear


@dataclass(frozen=True, slots=True)
class Fp8Ops:
    """Quantising of rows, alone and behind what produces them, and the product of what comes out."""

    quantize_rows: Callable[[torch.Tensor], QuantizedRows]
    norm_quantize_rows: Callable[..., tuple[QuantizedRows, torch.Tensor]]
    gated_quantize_rows: Callable[[torch.Tensor, str], QuantizedRows]
    scaled_linear: Callable[[QuantizedRows, QuantizedRows, torch.Tensor | None, torch.dtype], torch.Tensor]


REFERENCE = Fp8Ops(quantize.quantize_rows, quantize.norm_quantize_rows, quantize.gated_quantize_rows, scaled_linear)


def fp8_ops_for(device: torch.device) -> Fp8Ops:
    """The fastest implementations that this device has."""
    if device.type != "cuda":
        return REFERENCE
    from bough.kernels.quantize_rows import triton as fast  # needs triton, which only machines with a GPU must have
    from bough.kernels.scaled_linear import library

    return Fp8Ops(fast.quantize_rows, fast.norm_quantize_rows, fast.gated_quantize_rows, library.scaled_linear)
