"""How a skinny product is cut into programs, and when it is worth taking: pure functions of its shape.

*By rows*, a program holds a few whole weight rows in registers, so that every byte is asked for at once: best for small
weights. *By tiles*, it streams its rows through shared memory and multiplies on tensor cores, which costs the same for
1 row of `x` as for 16. The rules follow what an H200 measured for a 0.6B and an 8B model (`gpu_bench_linear.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        return _by_rows(m, n, k, itemsize)
    return _by_tiles(n, k, itemsize)


def fitted(cut: Tiling, itemsize: int, room: int) -> Tiling:
    """The cut with no more tiles in flight than have room in a program's shared memory, where all but one are kept."""
    if cut.by_rows:
        return cut
    stages = 1 + room // ((MAX_ROWS + cut.block_n) * cut.block_k * itemsize)
    return cut if stages >= cut.num_stages else replace(cut, num_stages=stages)


def fused_config_for(m: int, k: int, itemsize: int = 2, *, gated: bool) -> Tiling:
    """The cut of a product with a norm before it and, if gated, a gate behind: always by rows."""
    width = power_of_two_above(k)
    short = width * itemsize <= WARP_BYTES // 2
    warps = 2 if m > 1 else 4 if short or gated else 8
    if not gated:
        return _rows_of(warps, width, itemsize)
    block_n = max(1, min(4, 4 * WARP_BYTES // (width * itemsize)))  # twice over: the gate's rows and up's
    loaded = 2 * block_n * width * itemsize
    return Tiling(True, block_n, width, num_warps=max(warps, loaded // MAX_WARP_BYTES))


def _by_rows(m: int, n: int, k: int, itemsize: int) -> Tiling:
    """Long rows take few warps where there are few of them, so that all are asked for at once."""
    width = power_of_two_above(k)
    if width * itemsize <= WARP_BYTES // 2:
        warps = 8 if m == 1 else 2
    else:
        warps = 2 if m == 1 and n <= 2 * FEW_OUTPUTS else 4
    return _rows_of(warps, width, itemsize)


def _rows_of(warps: int, width: int, itemsize: int) -> Tiling:
    """As many rows as give each warp its share; for a single row, as many warps as can hold it."""
    block_n = max(1, warps * WARP_BYTES // (width * itemsize))
    return Tiling(True, block_n, width, num_warps=max(warps, block_n * width * itemsize // MAX_WARP_BYTES))


def _by_tiles(n: int, k: int, itemsize: int) -> Tiling:
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


def power_of_two_above(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
