"""Gated activations in Triton: one pass over gate and up, without a tensor between activation and product."""

import torch
import triton
import triton.language as tl

from bough.kernels.activation.reference import relu2
from bough.kernels.overlap import overlap, take_turn


def config_for(rows: int, size: int) -> int:
    """Outputs per program: short blocks spread a few rows over the device, long ones do with fewer programs."""
    block = 256 if rows <= 16 else 1024
    return min(block, int(triton.next_power_of_2(size)))


def gated_mul(x: torch.Tensor, activation: str, *, config: int | None = None) -> torch.Tensor:
    """As the reference, for x whose last dimension is contiguous."""
    if activation == "relu2":
        return relu2(x)
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    source = x if x.ndim == 2 else x.reshape(-1, 2 * size)
    rows = source.shape[0]
    if rows == 0:
        return out
    block = config or config_for(rows, size)
    grid = (rows, triton.cdiv(size, block))
    warps = max(1, min(8, block // 256))
    _gated_rows[grid](
        source, out, source.stride(0), SIZE=size, ACTIVATION=activation, BLOCK=block, num_warps=warps, **overlap(rows)
    )
    return out


@triton.jit
def _gated_rows(
    x, out, x_stride, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(x + row * x_stride + column, mask=mask, other=0.0)
    up = tl.load(x + row * x_stride + SIZE + column, mask=mask, other=0.0)
    tl.store(out + row * SIZE + column, gated(gate, up, ACTIVATION), mask=mask)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr = 0.0, LIMIT: tl.constexpr = 0.0):
    """`activation(gate) * up`, rounded to the type of `gate` after each of the two steps as the reference is. For
    "relu2" both are what is activated."""
    wide = gate.to(tl.float32)
    if ACTIVATION == "silu" or ACTIVATION == "relu2":
        slope = wide
    elif ACTIVATION == "clamped":
        wide = tl.minimum(wide, LIMIT)
        up = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT) + 1.0
        slope = SLOPE * wide
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(u)) / 2 = sigmoid(2 u): this needs no hyperbolic tangent.
        slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    active = tl.maximum(wide, 0.0) if ACTIVATION == "relu2" else wide / (1.0 + tl.exp(-slope))
    active = active.to(gate.dtype)
    return (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
