"""Products of a few rows with a weight in Triton: for decoding, where the time is that of reading the weight.

The one piece of state is a row of counters on each device, by which programs that share an output find out which of
them is the last. A product leaves them at zero, so they need no clearing; products on one device must not overlap.
"""

# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton

from bough.kernels.overlap import overlap
from bough.kernels.quantize_rows.reference import GROUP
from bough.kernels.shared_memory import shared_bytes
from bough.kernels.skinny_linear.device import product_by_rows, product_by_tiles
from bough.kernels.skinny_linear.tiling import (
    MAX_ROWS,
    MAX_ROWS_BY_ROWS,
    MAX_WIDTH_BY_ROWS,
    Tiling,
    config_for,
    fitted,
    fused_config_for,
    power_of_two_above,
)

MAX_SHARED_TILES = 4096


def skinny_linear(
    x: torch.Tensor,  # [rows, in], at most 16 rows, which may be strided
    weight: torch.Tensor,  # [out, in], contiguous
    bias: torch.Tensor | None = None,  # [out]
    *,
    scales: torch.Tensor | None = None,  # [out, 1] or [out, groups] of a weight of 8 bits
    out: torch.Tensor | None = None,  # [rows, out]
    config: Tiling | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in float32, written to `out` if given."""
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty((m, n)) if out is None else out
    tiling = config or fitted(config_for(m, n, k, weight.element_size()), x.element_size(), shared_bytes())
    if scales is not None and scales.shape[1] > 1:
        tiling = replace(tiling, block_k=GROUP if tiling.by_rows else min(GROUP, tiling.block_k))
    if tiling.by_rows:
        _by_rows(tiling, x, weight, out, bias=bias, scales=scales)
    else:
        _by_tiles(tiling, x, weight, out, bias, scales)
    return out


def skinny_norm_linear(
    x: torch.Tensor,  # [rows, in], at most 4 rows
    residual: torch.Tensor | None,  # like x
    norm_weight: torch.Tensor,  # [in]
    eps: float,
    plus_one: bool,
    weight: torch.Tensor,  # [out, in], contiguous
    bias: torch.Tensor | None = None,  # [out]
    *,
    config: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the norm of x + residual, and that sum, which is the next residual. `residual` stays as it is."""
    (m, k), n = x.shape, weight.shape[0]
    tiling = config or fused_config_for(m, k, x.element_size(), gated=False)
    out = x.new_empty((m, n))
    stream = _by_rows(tiling, x, weight, out, bias=bias, norm=(norm_weight, eps, plus_one), residual=residual)
    return out, stream


def skinny_gate_up(
    x: torch.Tensor,  # [rows, in], at most 4 rows
    residual: torch.Tensor | None,  # like x
    norm_weight: torch.Tensor,  # [in]
    eps: float,
    plus_one: bool,
    weight: torch.Tensor,  # [2 * inner, in], contiguous: the gate's rows, then up's
    activation: str,  # "silu" or "gelu_tanh"
    *,
    config: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`activation(gate) * up` of the norm of x + residual, and that sum, the next residual. `residual` stays."""
    (m, k), inner = x.shape, weight.shape[0] // 2
    tiling = config or fused_config_for(m, k, x.element_size(), gated=True)
    out = x.new_empty((m, inner))
    norm, gate = (norm_weight, eps, plus_one), (weight[inner:], activation)
    return out, _by_rows(tiling, x, weight[:inner], out, norm=norm, residual=residual, gate=gate)


def _by_rows(
    tiling: Tiling,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float, bool] | None = None,  # weight, eps, plus_one
    residual: torch.Tensor | None = None,
    gate: tuple[torch.Tensor, str] | None = None,  # the weight of up, activation
) -> torch.Tensor:
    """Fills `out`, and returns the stream: a new tensor if there is a residual to add, else `x`."""
    (m, k), n = x.shape, weight.shape[0]
    if not tiling.by_rows or tiling.split_k > 1 or m > MAX_ROWS_BY_ROWS or k > MAX_WIDTH_BY_ROWS:
        raise ValueError(f"A skinny product of {m} rows and {k} inputs cannot be taken by rows, as {tiling}.")
    norm_weight, eps, plus_one = norm or (None, 0.0, False)
    up_weight, activation = gate or (None, "")
    stream = x if residual is None else x.new_empty((m, k))
    width = power_of_two_above(k)
    piece = min(width, tiling.block_k)
    groups = 1 if scales is None else scales.shape[1]
    product_by_rows[(triton.cdiv(n, tiling.block_n),)](
        x, residual, norm_weight, weight, scales, up_weight, bias, out, stream, x.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0), eps, n,
        M=m, K=k, GROUPS=groups, PLUS_ONE=plus_one, ACTIVATION=activation, BLOCK_N=tiling.block_n,
        PIECES=width // piece, PIECE=piece, num_warps=tiling.num_warps, **overlap(m),
    )  # fmt: skip
    return stream


def _by_tiles(
    tiling: Tiling,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """Fills `out`."""
    (m, k), n = x.shape, weight.shape[0]
    tiles = triton.cdiv(n, tiling.block_n)
    if m > MAX_ROWS or (tiling.split_k > 1 and tiles > MAX_SHARED_TILES):
        raise ValueError(f"A skinny product of {m} rows and {n} outputs cannot be taken by tiles, as {tiling}.")
    partials, arrivals = None, None
    if tiling.split_k > 1:
        shape = (tiling.split_k, tiles, MAX_ROWS, tiling.block_n)
        partials, arrivals = torch.empty(shape, dtype=torch.float32, device=x.device), _arrivals(x.device)
    product_by_tiles[(tiles, tiling.split_k)](
        x, weight, scales, bias, out, partials, arrivals, x.stride(0), out.stride(0), m, n,
        K=k, GROUPS=1 if scales is None else scales.shape[1], BLOCK_M=MAX_ROWS, BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k, SPLIT_K=tiling.split_k, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        **overlap(m),
    )  # fmt: skip


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """How many programs have summed their part of each tile: zero between products."""
    return torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)
