"""Products of a few rows with a weight in Triton: for decoding, where the time is that of reading the weight.

The one piece of state is a row of counters on each device, by which programs that share an output find out which of
them is the last. A product leaves them at zero, so they need no clearing; products on one device must not overlap.
"""

# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import functools

import torch
import triton

from bough.kernels.rms_norm.triton import rms_norm
from bough.kernels.skinny_linear.device import product_by_rows, product_by_tiles
from bough.kernels.skinny_linear.tiling import (
    MAX_ROWS,
    MAX_ROWS_BY_ROWS,
    MAX_WIDTH_BY_ROWS,
    Tiling,
    config_for,
    power_of_two_above,
)

MAX_SHARED_TILES = 4096


def skinny_linear(
    x: torch.Tensor,  # [rows, in], at most 16 rows, which may be strided
    weight: torch.Tensor,  # [out, in], contiguous
    bias: torch.Tensor | None = None,  # [out]
    *,
    out: torch.Tensor | None = None,  # [rows, out]
    config: Tiling | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in float32, written to `out` if given."""
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty((m, n)) if out is None else out
    tiling = config or config_for(m, n, k, x.element_size())
    _launch(tiling, x, weight, out, bias=bias)
    return out


def skinny_norm_linear(
    x: torch.Tensor,  # [rows, in], at most 16 rows
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
    tiling = config or config_for(m, n, k, x.element_size(), normed=True)
    if _norm_would_overflow(tiling, x):
        normed, stream = rms_norm(x, norm_weight, eps, None if residual is None else residual.clone(), plus_one)
        return skinny_linear(normed, weight, bias), stream
    out = x.new_empty((m, n))
    stream = _launch(tiling, x, weight, out, bias=bias, norm=(norm_weight, eps, plus_one), residual=residual)
    return out, stream


def skinny_gate_up(
    x: torch.Tensor,  # [rows, in], at most 16 rows
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
    tiling = config or config_for(m, inner, k, x.element_size(), normed=True, gated=True)
    norm: tuple[torch.Tensor, float, bool] | None = (norm_weight, eps, plus_one)
    stream = None
    if _norm_would_overflow(tiling, x):
        x, stream = rms_norm(x, norm_weight, eps, None if residual is None else residual.clone(), plus_one)
        norm = residual = None
    out = x.new_empty((m, inner))
    new = _launch(tiling, x, weight[:inner], out, norm=norm, residual=residual, gate=(weight[inner:], activation))
    return out, new if stream is None else stream


def _norm_would_overflow(tiling: Tiling, x: torch.Tensor) -> bool:
    """By tiles the rows meet the norm's weight before their length is known: too large for float16's range."""
    return x.dtype == torch.float16 and not tiling.by_rows


def _launch(
    tiling: Tiling,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float, bool] | None = None,  # weight, eps, plus_one
    residual: torch.Tensor | None = None,
    gate: tuple[torch.Tensor, str] | None = None,  # the weight of up, activation
) -> torch.Tensor:
    """Fills `out`, and returns the stream: a new tensor if there is a residual to add, else `x`."""
    (m, k), n = x.shape, weight.shape[0]
    _check(tiling, m, n, k, plain=norm is None and gate is None)
    norm_weight, eps, plus_one = norm or (None, 0.0, False)
    up_weight, activation = gate or (None, "")
    stream = x if residual is None else x.new_empty((m, k))
    tensors = (x, residual, norm_weight, weight, up_weight, bias, out, stream)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0))
    options = {"PLUS_ONE": plus_one, "ACTIVATION": activation, "BLOCK_N": tiling.block_n, "num_warps": tiling.num_warps}
    tiles = triton.cdiv(n, tiling.block_n)
    if tiling.by_rows:
        width = power_of_two_above(k)
        product_by_rows[(tiles,)](*tensors, *strides, eps, n, M=m, K=k, BLOCK_K=width, **options)
        return stream
    partials, arrivals = None, None
    if tiling.split_k > 1:
        shape = (tiling.split_k, tiles, MAX_ROWS, tiling.block_n)
        partials, arrivals = torch.empty(shape, dtype=torch.float32, device=x.device), _arrivals(x.device)
    product_by_tiles[(tiles, tiling.split_k)](
        *tensors,
        partials,
        arrivals,
        *strides,
        eps,
        m,
        n,
        K=k,
        BLOCK_M=MAX_ROWS,
        BLOCK_K=tiling.block_k,
        SPLIT_K=tiling.split_k,
        num_stages=tiling.num_stages,
        **options,
    )
    return stream


def _check(tiling: Tiling, m: int, n: int, k: int, plain: bool) -> None:
    """Refuses shapes and cuts that the kernels would compute wrongly."""
    if m > (MAX_ROWS_BY_ROWS if tiling.by_rows else MAX_ROWS) or (tiling.by_rows and k > MAX_WIDTH_BY_ROWS):
        raise ValueError(f"A skinny product of {m} rows and {k} inputs is beyond {tiling}.")
    if tiling.split_k > 1 and (tiling.by_rows or not plain or triton.cdiv(n, tiling.block_n) > MAX_SHARED_TILES):
        raise ValueError(f"The inputs of this product cannot be split: {tiling}.")


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """How many programs have summed their part of each tile: zero between products."""
    return torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)
