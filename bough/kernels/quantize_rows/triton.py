"""Quantising rows in Triton: a program holds a row in registers, so that it is read once and written once in 8 bits.

What produces the row happens in the same registers, rounded to the type of `x` where it would be between two launches.
"""

import torch
import triton
import triton.language as tl

from bough.kernels.activation.triton import gated
from bough.kernels.overlap import overlap, take_turn
from bough.kernels.quantize_rows.reference import LARGEST, SMALLEST_AMAX, QuantizedRows, empty_rows


def config_for(size: int) -> int:
    """Warps of a program: eight values or more for each thread."""
    return min(16, max(1, int(triton.next_power_of_2(size)) // 256))


def quantize_rows(x: torch.Tensor, group: int = 0) -> QuantizedRows:
    """As the reference, for x whose last dimension is contiguous, and groups of a power of two."""
    return _launch(x, x.shape[1], group)


def norm_quantize_rows(
    x: torch.Tensor,  # [rows, size], the last dimension contiguous
    weight: torch.Tensor,  # [size]
    eps: float,
    residual: torch.Tensor | None = None,  # like x
    plus_one: bool = False,
    group: int = 0,
) -> tuple[QuantizedRows, torch.Tensor]:
    """As the reference, but the sum is written into `residual`, which is returned. Without one it is `x` itself."""
    return _launch(x, x.shape[1], group, residual, weight, eps, plus_one), x if residual is None else residual


def gated_quantize_rows(x: torch.Tensor, activation: str, group: int = 0) -> QuantizedRows:
    """As the reference, for the same."""
    return _launch(x, x.shape[1] // 2, group, activation=activation)


def _launch(
    x: torch.Tensor,
    size: int,
    group: int,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,  # of a norm
    eps: float = 0.0,
    plus_one: bool = False,
    activation: str = "",
) -> QuantizedRows:
    count = x.shape[0]
    out = empty_rows(count, size, group=group, device=x.device)
    if count:
        _quantize[(count,)](
            x, residual, weight, *out, eps, x.stride(0), 0 if residual is None else residual.stride(0),
            ACTIVATION=activation, PLUS_ONE=plus_one, SIZE=size, BLOCK=max(triton.next_power_of_2(size), group),
            GROUP=group, LARGEST=LARGEST, SMALLEST_AMAX=SMALLEST_AMAX, num_warps=config_for(size), **overlap(count),
        )  # fmt: skip
    return out


@triton.jit
def _quantize(
    x, residual, weight, values, scales, eps, x_stride, residual_stride,
    ACTIVATION: tl.constexpr, PLUS_ONE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row, zero beyond its end, with its scale or those of its groups: as it is, normed, or gated."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = column < SIZE
    if weight is not None:
        factor = tl.load(weight + column, mask=here, other=0.0).to(tl.float32)
    take_turn(OVERLAP)
    held = tl.load(x + row * x_stride + column, mask=here, other=0.0)
    if residual is not None:
        stream = residual + row * residual_stride + column
        added = held.to(tl.float32) + tl.load(stream, mask=here, other=0.0).to(tl.float32)
        held = added.to(held.dtype)
        tl.store(stream, held, mask=here)
    if ACTIVATION != "":
        held = gated(held, tl.load(x + row * x_stride + SIZE + column, mask=here, other=0.0), ACTIVATION)
    wide = held.to(tl.float32)
    if weight is not None:
        if PLUS_ONE:
            factor += 1.0
        normed = (wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps) * factor).to(held.dtype)
        wide = normed.to(tl.float32)
    if GROUP > 0:
        grouped = tl.reshape(wide, (BLOCK // GROUP, GROUP))
        amax = tl.maximum(tl.max(tl.abs(grouped), axis=1), SMALLEST_AMAX)
        scaled = tl.reshape(grouped * (LARGEST / amax)[:, None], (BLOCK,))
        number: tl.constexpr = (SIZE + GROUP - 1) // GROUP
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row * number + group, amax * (1.0 / LARGEST), mask=group < number)
    else:
        amax = tl.maximum(tl.max(tl.abs(wide)), SMALLEST_AMAX)
        scaled = wide * (LARGEST / amax)
        tl.store(scales + row, amax * (1.0 / LARGEST))
    scaled = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + row * SIZE + column, scaled.to(values.dtype.element_ty), mask=here)
