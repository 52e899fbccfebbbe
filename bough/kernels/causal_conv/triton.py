"""The short convolution in Triton: a program takes some channels of a row through the step, and then their tail."""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.kernels.state_rows import StateRows

BLOCK_CHANNELS, BLOCK_TOKENS = 128, 32


def causal_conv_(
    x: torch.Tensor,  # its last dimension contiguous
    weight: torch.Tensor,  # contiguous
    bias: torch.Tensor | None,
    tails: torch.Tensor,  # its last two dimensions contiguous
    rows: StateRows,
    silu: bool = True,
) -> torch.Tensor:
    """As the reference. Rows are distinct, apart from padding, which writes to page 0."""
    tokens, channels = x.shape
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    _causal_conv[(len(rows.rows), triton.cdiv(channels, BLOCK_CHANNELS))](
        x, weight, bias, tails, out, rows.table, rows.rows, rows.starts,
        x.stride(0), tails.stride(0), rows.table.stride(0),
        CHANNELS=channels, WIDTH=weight.shape[1], SILU=silu, BLOCK_C=BLOCK_CHANNELS,
        BLOCK_T=1 if rows.starts is None else BLOCK_TOKENS,
        num_warps=1 if rows.starts is None else 4,
    )  # fmt: skip
    return out


@triton.jit
def _causal_conv(
    x, weight, bias, tails, out, table, rows, starts, token_stride, page_stride, table_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    begin, end = place, place + 1
    if starts is not None:
        begin, end = tl.load(starts + place), tl.load(starts + place + 1)
    if end <= begin:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CHANNELS
    page = tl.load(table + tl.load(rows + place).to(tl.int64) * table_stride).to(tl.int64)
    tail = tails + page * page_stride + c
    for first in range(begin, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        if bias is not None:
            total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            at = t + (tap + 1 - WIDTH)
            old = (at < begin)[:, None] & inside[None, :]
            fresh = ((at >= begin) & (t < end))[:, None] & inside[None, :]
            value = tl.load(x + at.to(tl.int64)[:, None] * token_stride + c[None, :], mask=fresh, other=0.0)
            kept = tl.load(tail[None, :] + (at - begin + WIDTH - 1)[:, None] * CHANNELS, mask=old, other=0.0)
            scale = tl.load(weight + c * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
            total += scale[None, :] * tl.where(old, kept, value.to(tl.float32))
        if SILU:
            total *= tl.sigmoid(total)
        places = out + t.to(tl.int64)[:, None] * CHANNELS + c[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=(t < end)[:, None] & inside[None, :])
    tl.debug_barrier()  # other threads may still read what this one overwrites
    for slot in tl.static_range(WIDTH - 1):
        # Of a row with few tokens, what was behind moves up: it is read before its own slot is written.
        at = end - (WIDTH - 1) + slot
        value = tl.load(x + at.to(tl.int64) * token_stride + c, mask=inside & (at >= begin), other=0.0).to(tl.float32)
        kept = tl.load(tail + (slot + end - begin) * CHANNELS, mask=inside & (at < begin), other=0.0)
        tl.store(tail + slot * CHANNELS, tl.where(at < begin, kept, value), mask=inside)
