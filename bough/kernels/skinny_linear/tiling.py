"""How a skinny product is cut into programs: a pure function of its shape, to be tuned by measurement.

There are two ways. *By rows*, a program holds the whole length of a few weight rows in registers: every byte it will
ever need is asked for at once, which is what counts when the weight is small and latency is all of the time. *By
tiles*, a program streams its rows through shared memory a tile at a time and multiplies on tensor cores, which costs
the same for 1 row of `x` as for 16 and keeps many bytes in flight for as long as the weight lasts.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 16  # the smallest side of a tensor-core product
MAX_ROWS_BY_ROWS = 4  # beyond, multiplying without tensor cores takes longer than reading the weight
MAX_WIDTH_BY_ROWS = 16384  # longer weight rows do not fit the registers of a program
WAVE = 256  # programs that keep a large device busy


@dataclass(frozen=True, slots=True)
class Tiling:
    """One cut. Sides of blocks are powers of two; tiles have at least 16 outputs and 16 inputs."""

    by_rows: bool
    block_n: int  # outputs of a program
    block_k: int  # inputs of a tile; unused by rows, where a tile has all
    split_k: int = 1  # programs that share an output, each summing a range of inputs; plain products by tiles only
    num_warps: int = 4
    num_stages: int = 4  # tiles in flight; unused by rows


def config_for(m: int, n: int, k: int, itemsize: int = 2, *, normed: bool = False, gated: bool = False) -> Tiling:
    """The cut for x [m, k] and n outputs: of a gated product, n counts the gated outputs."""
    weight_bytes = n * k * itemsize * (2 if gated else 1)
    if m <= 2 and k <= MAX_WIDTH_BY_ROWS and weight_bytes <= 32 << 20:
        return _by_rows(n, k, itemsize, gated)
    return _by_tiles(n, k, itemsize, normed, gated)


def _by_rows(n: int, k: int, itemsize: int, gated: bool) -> Tiling:
    """About 16 KiB for each program, in 16-byte pieces, eight for each thread."""
    width = power_of_two_above(k)
    share = (16 << 10) // (width * itemsize * (2 if gated else 1))
    block_n = max(1, min(share, n // WAVE))
    block_n = 1 << (block_n.bit_length() - 1)
    loaded = block_n * width * itemsize * (2 if gated else 1)
    return Tiling(True, block_n, width, num_warps=min(16, max(1, loaded // (32 * 128))))


def _by_tiles(n: int, k: int, itemsize: int, normed: bool, gated: bool) -> Tiling:
    """Wide blocks where the weight is tall; where it is not, its inputs are shared among programs."""
    block_n = 16 if n <= 4096 else 32 if n <= 65536 else 64
    block_k = 256 * 2 // itemsize
    if normed or gated:  # more tensors share the stages
        block_k //= 2
    split_k = 1
    if not (normed or gated):
        while -(-n // block_n) * split_k < WAVE and k // (split_k * 2) >= 2 * block_k:
            split_k *= 2
    return Tiling(False, block_n, block_k, split_k)


def power_of_two_above(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
