"""Products of a few rows with a weight in Triton: for decoding, where the time is that of reading the weight.

*By rows*, a program holds a few whole weight rows in registers, so that every byte is asked for at once: best for small
weights. *By tiles*, it streams its rows through shared memory and multiplies on tensor cores, which costs the same for
1 row of `x` as for 16. How a product is cut, and when it is worth taking, are pure functions of its shape, by rules
that follow what an H200 measured for a 0.6B and an 8B model (`gpu_bench_linear.py`).

The one piece of state is a row of counters on each device, by which programs that share an output find out which of
them is the last. A product leaves them at zero, so they need no clearing; products on one device must not overlap.
"""

from dataclasses import dataclass, replace

import torch
import triton

from bough.kernels.overlap import overlap, zeros_of_stream
from bough.kernels.quantize_rows.reference import GROUP
from bough.kernels.shared_memory import shared_bytes
from bough.kernels.skinny_linear.device import product_by_rows, product_by_tiles

MAX_ROWS = 16  # the smallest side of a tensor-core product
MAX_ROWS_BY_ROWS = 4  # beyond, multiplying without tensor cores takes longer than reading the weight
MAX_WIDTH_BY_ROWS = 16384  # longer weight rows do not fit the registers of a program

LONG_ROW = 4096  # inputs; up to here two rows of `x` are still multiplied faster than a weight row is read
FEW_OUTPUTS = 4096  # fewer than fill a device with wide tiles: libraries leave part of it idle
MANY_OUTPUTS = 65536  # a vocabulary's worth: long enough for the rate of reading to be all that counts
WAVE = 128  # programs by tiles that keep a large device busy, about one for each multiprocessor
SPLIT_INPUTS = 2048  # inputs that are worth a program of their own even when the device is busy
WARP_BYTES = 4 << 10  # of the weight: eight pieces of 16 bytes for each thread
MAX_WARP_BYTES = 8 << 10  # more spills registers


@dataclass(frozen=True, slots=True)
class Tiling:
    """One cut. Sides of blocks are powers of two; tiles have at least 16 outputs and 16 inputs."""

    by_rows: bool
    block_n: int  # outputs of a program
    block_k: int  # inputs of a tile; by rows, of a piece: short pieces keep each row within a warp (see `device.py`)
    split_k: int = 1  # programs that share an output, each summing a range of inputs; by tiles only
    num_warps: int = 4
    num_stages: int = 4  # tiles in flight; unused by rows


def worth(m: int, n: int, k: int) -> bool:
    """Whether `skinny_linear` has been faster than torch's libraries for x [m, k] and n outputs, not merely as fast."""
    if m == 1 and k <= MAX_WIDTH_BY_ROWS:
        return True
    if m > MAX_ROWS:
        return False
    by_rows_at_full_rate = m == 2 and LONG_ROW // 2 <= k <= LONG_ROW
    return n >= MANY_OUTPUTS or (n <= FEW_OUTPUTS and k <= LONG_ROW) or by_rows_at_full_rate


def fused_worth(m: int, n: int, k: int) -> bool:
    """Whether a norm fused with its product, or also with the gate, has been faster than launches of their own.

    `n` makes no difference, since every program takes the norm anew for its few outputs.
    """
    return (m == 1 and k <= LONG_ROW) or (m == 2 and k <= 1024)


def config_for(m: int, n: int, k: int, itemsize: int = 2) -> Tiling:
    """The cut of a plain product of x [m, k] with n outputs."""
    if (m == 1 and k <= MAX_WIDTH_BY_ROWS) or (m == 2 and k <= LONG_ROW):
        return _cut_by_rows(m, n, k, itemsize)
    return _cut_by_tiles(n, k, itemsize)


def fitted(cut: Tiling, itemsize: int, room: int) -> Tiling:
    """The cut with no more tiles in flight than have room in a program's shared memory, where all but one are kept."""
    if cut.by_rows:
        return cut
    stages = 1 + room // ((MAX_ROWS + cut.block_n) * cut.block_k * itemsize)
    return cut if stages >= cut.num_stages else replace(cut, num_stages=stages)


def fused_config_for(m: int, k: int, itemsize: int = 2, *, gated: bool) -> Tiling:
    """The cut of a product with a norm before it and, if gated, a gate behind: always by rows."""
    width = triton.next_power_of_2(k)
    short = width * itemsize <= WARP_BYTES // 2
    warps = 2 if m > 1 else 4 if short or gated else 8
    if not gated:
        return _rows_of(warps, width, itemsize)
    block_n = max(1, min(4, 4 * WARP_BYTES // (width * itemsize)))  # twice over: the gate's rows and up's
    loaded = 2 * block_n * width * itemsize
    return Tiling(True, block_n, width, num_warps=max(warps, loaded // MAX_WARP_BYTES))


def _cut_by_rows(m: int, n: int, k: int, itemsize: int) -> Tiling:
    """Long rows take few warps where there are few of them, so that all are asked for at once."""
    width = triton.next_power_of_2(k)
    if width * itemsize <= WARP_BYTES // 2:
        warps = 8 if m == 1 else 2
    else:
        warps = 2 if m == 1 and n <= 2 * FEW_OUTPUTS else 4
    return _rows_of(warps, width, itemsize)


def _rows_of(warps: int, width: int, itemsize: int) -> Tiling:
    """As many rows as give each warp its share; for a single row, as many warps as can hold it."""
    block_n = max(1, warps * WARP_BYTES // (width * itemsize))
    return Tiling(True, block_n, width, num_warps=max(warps, block_n * width * itemsize // MAX_WARP_BYTES))


def _cut_by_tiles(n: int, k: int, itemsize: int) -> Tiling:
    """Tall weights in wide blocks; where there are few outputs, their inputs are shared among programs."""
    unit = 128 * 2 // itemsize
    if n >= MANY_OUTPUTS and k >= LONG_ROW:
        return Tiling(False, 32, 2 * unit, num_stages=4)
    if n > FEW_OUTPUTS:
        return Tiling(False, 64, unit, num_stages=5)
    programs, split_k = -(-n // 32), 1
    while programs * split_k < 2 * WAVE:
        share = k // (2 * split_k)
        if share < (2 * unit if programs * split_k < WAVE else SPLIT_INPUTS):
            break
        split_k *= 2
    return Tiling(False, 32, unit, split_k, num_stages=5)


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
    width = triton.next_power_of_2(k)
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


def _arrivals(device: torch.device) -> torch.Tensor:
    """How many programs have summed their part of each tile: zero between products."""
    return zeros_of_stream("tiles of products", MAX_SHARED_TILES, device)
