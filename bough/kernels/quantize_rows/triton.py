"""Quantising rows in Triton: a program holds a row in registers, so that it is read once and written once in 8 bits.

What produces the row happens in the same registers, rounded to the type of `x` where it would be between two launches.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.kernels.activation.triton import gated
from bough.kernels.quantize_rows.reference import FP8, LARGEST, SMALLEST_AMAX, QuantizedRows


def config_for(size: int) -> int:
    """Warps of a program: eight values or more for each thread."""
    return min(16, max(1, int(triton.next_power_of_2(size)) // 256))


def quantize_rows(
    x: torch.Tensor,  # [rows, size], the last dimension contiguous
    *,
    config: int | None = None,
) -> QuantizedRows:
    """Each row is divided by what makes its largest value the largest 8-bit one. NaN stays NaN."""
    rows, size = x.shape
    out = _empty(rows, size, x.device)
    if rows:
        _quantize[(rows,)](x, *out, x.stride(0), **_shape(size, config))
    return out


def norm_quantize_rows(
    x: torch.Tensor,  # [rows, size], the last dimension contiguous
    weight: torch.Tensor,  # [size]
    eps: float,
    residual: torch.Tensor | None = None,  # like x
    plus_one: bool = False,
    *,
    config: int | None = None,
) -> tuple[QuantizedRows, torch.Tensor]:
    """As the reference, but the sum is written into `residual`, which is returned. Without one it is `x` itself."""
    rows, size = x.shape
    out = _empty(rows, size, x.device)
    stream = x if residual is None else residual
    if rows:
        strides = (x.stride(0), stream.stride(0))
        options = {"PLUS_ONE": plus_one, **_shape(size, config)}
        _norm_quantize[(rows,)](x, residual, weight, *out, eps, *strides, **options)
    return out, stream


def gated_quantize_rows(
    x: torch.Tensor,  # [rows, 2 * size]: gate | up, the last dimension contiguous
    activation: str,  # "silu" or "gelu_tanh"
    *,
    config: int | None = None,
) -> QuantizedRows:
    """`activation(gate) * up`, quantised."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = _empty(rows, size, x.device)
    if rows:
        _gated_quantize[(rows,)](x, *out, x.stride(0), ACTIVATION=activation, **_shape(size, config))
    return out


def _empty(rows: int, size: int, device: torch.device) -> QuantizedRows:
    return QuantizedRows(
        torch.empty((rows, size), dtype=FP8, device=device),
        torch.empty((rows, 1), dtype=torch.float32, device=device),
    )


def _shape(size: int, config: int | None) -> dict[str, float]:
    return {
        "SIZE": size,
        "BLOCK": triton.next_power_of_2(size),
        "LARGEST": LARGEST,
        "SMALLEST_AMAX": SMALLEST_AMAX,
        "num_warps": config or config_for(size),
    }


@triton.jit
def _quantize(
    x, values, scales, x_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = column < SIZE
    held = tl.load(x + row * x_stride + column, mask=here, other=0.0)
    _store_row(held.to(tl.float32), values + row * SIZE + column, scales + row, here, LARGEST, SMALLEST_AMAX)


@triton.jit
def _norm_quantize(
    x, residual, weight, values, scales, eps, x_stride, residual_stride,
    PLUS_ONE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr,
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
    _store_row(normed.to(tl.float32), values + row * SIZE + column, scales + row, here, LARGEST, SMALLEST_AMAX)


@triton.jit
def _gated_quantize(
    x, values, scales, x_stride,
    ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = column < SIZE
    gate = tl.load(x + row * x_stride + column, mask=here, other=0.0)
    up = tl.load(x + row * x_stride + SIZE + column, mask=here, other=0.0)
    wide = gated(gate, up, ACTIVATION).to(tl.float32)
    _store_row(wide, values + row * SIZE + column, scales + row, here, LARGEST, SMALLEST_AMAX)


@triton.jit
def _store_row(wide, places, scale_place, here, LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr):
    """Quantises one row of float32 values, zero beyond its end, and stores it with its scale."""
    amax = tl.maximum(tl.max(tl.abs(wide)), SMALLEST_AMAX)
    scaled = tl.clamp(wide * (LARGEST / amax), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(places, scaled.to(places.dtype.element_ty), mask=here)
    tl.store(scale_place, amax * (1.0 / LARGEST))
