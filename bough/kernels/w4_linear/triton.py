"""Products with 4-bit weights in Triton."""

import functools

import torch
import torch.nn.functional as F
import triton
from triton import knobs
from triton.runtime import driver

from bough.kernels.ops import Norm
from bough.kernels.overlap import overlap
from bough.kernels.shared_memory import PLENTY, shared_bytes
from bough.kernels.w4_linear.device import fixed_row, sum_splits, w4_by_rows, w4_by_tiles, w4_values
from bough.kernels.w4_linear.reference import BLOCK, HALF, W4Rows

MOST_TILED = 128  # rows of `x`; beyond, the weight is dequantised for torch's product
ROWS_N, ROWS_WARPS = 4, 2  # weight rows of a program by rows
ROWS_BLOCKS, FEW_ROWS = 32, 4096  # blocks that it holds of each at once, and half of it where there are more rows
TILE_N, TILE_WARPS, TILE_STAGES = 64, 4, 3
PROGRAMS = 8 * 132  # fewer tiles are split along the inputs, to have more of the weight in flight
LEAST_BLOCKS = 4  # of a split
VALUES_N = 64
SUM_WIDTH = 1024
FIXED_BLOCKS = 4  # of a row, in a program that makes integers of them


def w4_linear(
    x: torch.Tensor,  # [rows, in], which may be strided
    weight: W4Rows,  # of [out, in]
    bias: torch.Tensor | None = None,  # [out]
    *,
    room: int | None = None,  # bytes of shared memory; this machine's when left out
) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in float32."""
    (m, k), n = x.shape, weight.words.shape[0]
    if m > MOST_TILED:
        return F.linear(x, w4_dequantize(weight, k, x.dtype), bias)
    out, group = x.new_empty((m, n)), k // weight.scales.shape[1]
    if m == 1:
        _by_rows(x, weight, out, bias=bias)
        return out
    most = 128 if (room or shared_bytes()) >= PLENTY else 64
    block_m, blocks = min(most, max(16, triton.next_power_of_2(m))), triton.cdiv(k, BLOCK)
    tiles = triton.cdiv(n, TILE_N), triton.cdiv(m, block_m)
    splits = max(1, min(blocks // LEAST_BLOCKS, PROGRAMS // (tiles[0] * tiles[1])))
    parts = out if splits == 1 else torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    w4_by_tiles[(*tiles, splits)](
        x, *_by_bytes(weight), bias if splits == 1 else None, parts, x.stride(0), parts.stride(-2), m, n,
        K=k, GROUP=group, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=TILE_N,
        num_warps=TILE_WARPS,
        num_stages=TILE_STAGES if _on_nvidia() else 1,  # Triton fails to pipeline it for AMD's
        **overlap(m),
    )  # fmt: skip
    if splits > 1:
        sum_splits[(triton.cdiv(n, SUM_WIDTH), m)](
            parts, bias, out, n, SPLITS=splits, BLOCK=SUM_WIDTH, num_warps=4, **overlap(m)
        )
    return out


def _by_bytes(weight: W4Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.words.view(torch.uint8), weight.scales, weight.zeros


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
    k, (n, words) = x.shape[1], weight.words.shape
    blocks = words * 4 // HALF
    norm_weight, eps, plus_one = norm or (None, 0.0, False)
    stream = x if residual is None else x.new_empty((1, k))
    high, low = (torch.empty(blocks * BLOCK // 4, dtype=torch.int32, device=x.device) for _ in range(2))
    scales, sums = (torch.empty(count, dtype=torch.float32, device=x.device) for count in (blocks, blocks * 4))
    fixed_row[(triton.cdiv(blocks, FIXED_BLOCKS),)](
        x, residual, norm_weight, high, low, scales, sums, stream, eps,
        K=k, PLUS_ONE=plus_one, BLOCKS=FIXED_BLOCKS, WIDTH=triton.next_power_of_2(k), num_warps=4, **overlap(1),
    )  # fmt: skip
    w4_by_rows[(triton.cdiv(n, ROWS_N),)](
        high, low, scales, sums, *weight, bias, out, n,
        K=k, GROUP=k // weight.scales.shape[1], ACTIVATION=activation, BLOCK_N=ROWS_N,
        BLOCKS=min(ROWS_BLOCKS if n <= FEW_ROWS else ROWS_BLOCKS // 2, triton.next_power_of_2(blocks)),
        FOUR_AT_ONCE=_on_nvidia(), num_warps=ROWS_WARPS, **overlap(1),
    )  # fmt: skip
    return stream


@functools.cache
def _on_nvidia() -> bool:
    return not knobs.runtime.interpret and driver.active.get_current_target().backend == "cuda"


def w4_dequantize(weight: W4Rows, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The values of the weight. [out, in]"""
    n, groups = weight.scales.shape
    out = torch.empty((n, inputs), dtype=dtype, device=weight.words.device)
    w4_values[(triton.cdiv(n, VALUES_N), weight.words.shape[1] * 4 // HALF)](
        *_by_bytes(weight), out, n, K=inputs, GROUP=inputs // groups, BLOCK_N=VALUES_N
    )
    return out
