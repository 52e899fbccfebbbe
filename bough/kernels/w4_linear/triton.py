"""Products with 4-bit weights in Triton."""

# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from bough.kernels.ops import Norm
from bough.kernels.overlap import overlap
from bough.kernels.w4_linear.device import w4_by_rows, w4_by_tiles, w4_values
from bough.kernels.w4_linear.reference import LANES, W4Rows

MOST_TILED = 128  # rows of `x`; beyond, the weight is dequantised for torch's product
ROWS_N, ROWS_BLOCKS = 8, 32  # weight rows of a program by rows, and blocks that it holds of each at once
TILE_STAGES = {16: 8, 32: 5, 64: 3}  # blocks in flight, by the rows of a tile: as many as small devices have room for
FEW_OUTPUTS = 8192  # are cut into more tiles, to have more of the weight in flight
VALUES_N = 64
MAGIC = 0x4B000000  # 2.0**23 in bits


def w4_linear(
    x: torch.Tensor,  # [rows, in], which may be strided
    weight: W4Rows,  # of [out, in]
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in float32."""
    (m, k), n = x.shape, weight.words.shape[0]
    if m > MOST_TILED:
        return F.linear(x, w4_dequantize(weight, k, x.dtype), bias)
    out, group = x.new_empty((m, n)), k // weight.scales.shape[1]
    if m == 1:
        _by_rows(x, weight, out, bias=bias)
        return out
    block_m, block_n = min(64, max(16, triton.next_power_of_2(m))), 16 if n <= FEW_OUTPUTS else 32
    w4_by_tiles[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
        x, *weight, bias, out, MAGIC, x.stride(0), out.stride(0), m, n,
        K=k, GROUP=group, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=4, num_stages=TILE_STAGES[block_m], **overlap(m),
    )  # fmt: skip
    return out


def w4_norm_linear(
    x: torch.Tensor,  # [1, in]
    residual: torch.Tensor | None,  # like x
    norm: Norm,
    weight: W4Rows,  # of [out, in]
    bias: torch.Tensor | None = None,  # [out]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the norm of x + residual, and that sum, which is the next residual. `residual` stays as it is."""
    out = x.new_empty((1, weight.words.shape[0]))
    return out, _by_rows(x, weight, out, bias=bias, norm=norm, residual=residual)


def w4_norm_gate_up(
    x: torch.Tensor,  # [1, in]
    residual: torch.Tensor | None,  # like x
    norm: Norm,
    weight: W4Rows,  # of [2 * inner, in]: the gate's rows, then up's
    activation: str,  # "silu" or "gelu_tanh"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`activation(gate) * up` of the norm of x + residual, and that sum, the next residual. `residual` stays."""
    out = x.new_empty((1, weight.words.shape[0] // 2))
    return out, _by_rows(x, weight, out, norm=norm, residual=residual, activation=activation)


def _by_rows(
    x: torch.Tensor,
    weight: W4Rows,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
) -> torch.Tensor:
    """Fills `out`, and returns the stream: a new tensor if there is a residual to add, else `x`."""
    (m, k), n = x.shape, weight.words.shape[0]
    norm_weight, eps, plus_one = norm or (None, 0.0, False)
    stream = x if residual is None else x.new_empty((m, k))
    w4_by_rows[(triton.cdiv(n, ROWS_N),)](
        x, residual, norm_weight, *weight, bias, out, stream, MAGIC, eps, n,
        K=k, GROUP=k // weight.scales.shape[1], PLUS_ONE=plus_one, ACTIVATION=activation, BLOCK_N=ROWS_N,
        BLOCKS=min(ROWS_BLOCKS, triton.next_power_of_2(weight.words.shape[1] // LANES)), num_warps=4, **overlap(m),
    )  # fmt: skip
    return stream


def w4_dequantize(weight: W4Rows, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The values of the weight. [out, in]"""
    n, groups = weight.scales.shape
    out = torch.empty((n, inputs), dtype=dtype, device=weight.words.device)
    w4_values[(triton.cdiv(n, VALUES_N), weight.words.shape[1] // LANES)](
        *weight, out, MAGIC, n, K=inputs, GROUP=inputs // groups, BLOCK_N=VALUES_N
    )
    return out
