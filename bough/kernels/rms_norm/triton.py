"""RMS norm in Triton: the row is read once, and addition, statistics and scaling happen in registers."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bough.kernels.overlap import overlap, take_turn


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How many rows a program normalises, and with how many warps."""

    rows: int
    num_warps: int


def config_for(rows: int, size: int) -> RowTiling:
    """One row per program; of short rows, several once there are programs enough to fill the device."""
    block = triton.next_power_of_2(size)
    together = max(1, 1024 // block) if rows > 2048 else 1
    return RowTiling(together, num_warps=min(16, max(1, together * block // 256)))


def rms_norm(
    x: torch.Tensor,  # [..., size], the last dimension contiguous
    weight: torch.Tensor,  # [size]
    eps: float,
    residual: torch.Tensor | None = None,  # like x
    plus_one: bool = False,
    *,
    config: RowTiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, but the sum is written into `residual`, which is returned: the old stream is of no more use.

    Without a residual the stream is `x` itself. Arithmetic is in float32; the sum is rounded before the statistics.
    """
    size, rows = x.shape[-1], x.numel() // x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stream = x if residual is None else residual
    if rows == 0:
        return normed, stream
    tiling = config or config_for(rows, size)
    # A slice of heads is strided in its first dimension only; rows are addressed as (row // inner, row % inner).
    source = x if x.ndim == 3 else x.reshape(-1, 1, size)
    target = stream if stream.ndim == 3 else stream.view(-1, 1, size)
    _rms_norm[(triton.cdiv(rows, tiling.rows),)](
        source, None if residual is None else target, weight, normed, eps, rows, *source.stride()[:2],
        *target.stride()[:2],
        INNER=source.shape[1], SIZE=size, PLUS_ONE=plus_one, ROWS=tiling.rows, BLOCK=triton.next_power_of_2(size),
        num_warps=tiling.num_warps, **overlap(rows),
    )  # fmt: skip
    return normed, stream


# `rows` is left general: a step of another length must not wait for a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, residual, weight, out, eps, rows, x_outer, x_inner, residual_outer, residual_inner,
    INNER: tl.constexpr, SIZE: tl.constexpr, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < SIZE)
    outer, inner = row // INNER, row % INNER
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    take_turn(OVERLAP)
    values = tl.load(x + outer * x_outer + inner * x_inner + column, mask=mask, other=0.0)
    if residual is not None:
        stream = residual + outer * residual_outer + inner * residual_inner + column
        added = values.to(tl.float32) + tl.load(stream, mask=mask, other=0.0).to(tl.float32)
        values = added.to(values.dtype)
        tl.store(stream, values, mask=mask)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / SIZE + eps)
    if PLUS_ONE:
        scale += 1.0
    tl.store(out + row * SIZE + column, (normed * scale).to(values.dtype), mask=mask)
