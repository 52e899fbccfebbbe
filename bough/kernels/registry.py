"""Chooses the tables of operations for a device, so that a model without a GPU loads no Triton."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from bough.kernels.ops import REFERENCE, Ops
from bough.kernels.quantize_rows import reference as quantize
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.scaled_linear import reference as scaled
from bough.kernels.w4_linear import reference as w4


def ops_for(device: torch.device, deterministic: bool = False) -> Ops:
    """The fastest implementations that this device has; of a GPU's, those whose bits do not depend on the batch."""
    if device.type != "cuda":
        return REFERENCE
    from bough.kernels.triton_ops import INVARIANT, TRITON  # need triton, which only machines with a GPU must have

    return INVARIANT if deterministic else TRITON


@dataclass(frozen=True, slots=True)
class Fp8Ops:
    """Quantising of rows, alone and behind what produces them, the product of what comes out, and that of a few rows
    as they are."""

    quantize_rows: Callable[..., QuantizedRows]
    norm_quantize_rows: Callable[..., tuple[QuantizedRows, torch.Tensor]]
    gated_quantize_rows: Callable[[torch.Tensor, str, int], QuantizedRows]
    scaled_linear: Callable[[QuantizedRows, QuantizedRows, torch.Tensor | None, torch.dtype], torch.Tensor]
    weight_linear: Callable[[torch.Tensor, QuantizedRows, torch.Tensor | None], torch.Tensor]


def fp8_ops_for(device: torch.device) -> Fp8Ops:
    """The fastest implementations that this device has."""
    rows: ModuleType = quantize
    products: ModuleType = scaled
    if device.type == "cuda":
        from bough.kernels.quantize_rows import triton as rows  # needs triton, which only machines with a GPU must have
        from bough.kernels.scaled_linear import triton as products
    quantising = (rows.quantize_rows, rows.norm_quantize_rows, rows.gated_quantize_rows)
    return Fp8Ops(*quantising, products.scaled_linear, products.weight_linear)


@dataclass(frozen=True, slots=True)
class W4Ops:
    """The product with 4-bit weights, and, where the device has them, those that take one row: after its norm, and with
    the gate behind it."""

    linear: Callable[[torch.Tensor, w4.W4Rows, torch.Tensor | None], torch.Tensor]
    norm_linear: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    norm_gate_up: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None


def w4_ops_for(device: torch.device) -> W4Ops:
    """The fastest implementations that this device has."""
    if device.type != "cuda":
        return W4Ops(w4.w4_linear)
    from bough.kernels.w4_linear import triton as fast  # needs triton, which only machines with a GPU must have

    return W4Ops(fast.w4_linear, fast.w4_norm_linear, fast.w4_norm_gate_up)
