"""Quantising rows in Triton: a program holds a row in registers, so that it is read once and written once in 8 bits.

What produces the row happens in the same registers, rounded to the type of `x` where it would be between two launches.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.kernels.activation.triton import gated
from bough.kernels.quantize_rows.reference import LARGEST, SMALLEST_AMAX, QuantizedRows, empty_rows


def config_for(size: int) -> int:
    """Warps of a program: eight values or more for each thread."""
    return min(16, max(1, int(triton.next_power_of_2(size)) // 256))


def quantize_rows(
    x: torch.Tensor,  # [rows, size], the last dimension contiguous
    group: int = 0,  # values that share a scale, a power of two; 0: all of a row
    *,
    config: int | None = None,
) -> QuantizedRows:
    """Each row, or group, is divided by what makes its largest value the largest 8-bit one. NaN stays NaN."""
    rows, size = x.shape
    out = empty_rows(rows, size, group=group, device=x.device)
    if rows:
        _quantize[(rows,)](x, *out, x.stride(0), **_shape(size, group, config))
    return out


def norm_quantize_rows(
    x: torch.Tensor,  # [rows, size], the last dimension contiguous
    weight: torch.Tensor,  # [size]
    eps: float,
    residual: torch.Tensor | None = None,  # like x
    plus_one: bool = False,
    group: int = 0,
    *,
    config: int | None = None,
) -> tuple[QuantizedRows, torch.Tensor]:
    """As the reference, but the sum is written into `residual`, which is returned. Without one it is `x` itself."""
    rows, size = x.shape
    out = empty_rows(rows, size, group=group, device=x.device)
    stream = x if residual is None else residual
    if rows:
        strides = (x.stride(0), stream.stride(0))
        options = {"PLUS_ONE": plus_one, **_shape(size, group, config)}
        _norm_quantize[(rows,)](x, residual, weight, *out, eps, *strides, **options)
    return out, stream


def gated_quantize_rows(
    x: torch.Tensor,  # [rows, 2 * size]: gate | up, the last dimension contiguous
    activation: str,  # "silu" or "gelu_tanh"
    group: int = 0,
    *,
    config: int | None = None,
) -> QuantizedRows:
    """`activation(gate) * up`, quantised."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = empty_rows(rows, size, group=group, device=x.device)
    if rows:
        _gated_quantize[(rows,)](x, *out, x.stride(0), ACTIVATION=activation, **_shape(size, group, config))
    return out


def _shape(size: int, group: int, config: int | None) -> dict[str, float]:
    return {
        "SIZE": size,
        "BLOCK": max(triton.next_power_of_2(size), group),
        "GROUP": group,
        "LARGEST": LARGEST,
        "SMALLEST_AMAX": SMALLEST_AMAX,
        "num_warps": config or config_for(size),
    }


@triton.jit
def _quantize(
    x, values, scales, x_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    held = tl.load(x + row * x_stride + column, mask=column < SIZE, other=0.0)
    _store_row(held.to(tl.float32), values, scales, row, SIZE, BLOCK, GROUP, LARGEST, SMALLEST_AMAX)


@triton.jit
def _norm_quantize(
    x, residual, weight, values, scales, eps, x_stride, residual_stride,
    PLUS_ONE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = column < SIZE
    factor = tl.load(weight + column, mask=here, other=0.0).to(tl.float32)
    held = tl.load(x + row * x_stride + column, mask=here, other=0.0)
    if residual is not None:
        stream = residual + row * residual_stride + column
        added = held.to(tl.float32) + tl.load(stream, mask=here, other=0.0).to(tl.float32)
        held = added.to(held.dtype)
        tl.store(stream, held, mask=here)
    wide = held.to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps) * factor).to(held.dtype)
    _store_row(normed.to(tl.float32), values, scales, row, SIZE, BLOCK, GROUP, LARGEST, SMALLEST_AMAX)


@triton.jit
def _gated_quantize(
    x, values, scales, x_stride,
    ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = column < SIZE
    gate = tl.load(x + row * x_stride + column, mask=here, other=0.0)
    up = tl.load(x + row * x_stride + SIZE + column, mask=here, other=0.0)
    wide = gated(gate, up, ACTIVATION).to(tl.float32)
    _store_row(wide, values, scales, row, SIZE, BLOCK, GROUP, LARGEST, SMALLEST_AMAX)


@triton.jit
def _store_row(
    wide, values, scales, row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr,
):  # fmt: skip
    """Quantises one row of float32 values, zero beyond its end, and stores it with its scale or those of its groups."""
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
    column = tl.arange(0, BLOCK)
    tl.store(values + row * SIZE + column, scaled.to(values.dtype.element_ty), mask=column < SIZE)
