"""Products of any number of rows in Triton; a row's bits depend on the row and the weight alone.

The inputs are cut into *pieces*. Each is summed from zero in steps of 16 inputs, the depth of one tensor core
instruction, and the sums of the pieces are added in order. An output's bits depend on that order alone, which follows
from the weight's shape: a few rows fill the device by their pieces, many rows by their tiles. Tiles have at least 64
rows, because smaller ones use other instructions, which need not round alike.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from bough.kernels.shared_memory import shared_bytes
from bough.kernels.w4_linear.device import sum_splits

PIECE_STEP = 128  # pieces are multiples of it, and so of every tile's depth
SHORTEST_PIECE = 512  # inputs; below it the second launch costs more than the further programs save
NARROWEST = 32  # columns of the narrowest tile
ENOUGH_PROGRAMS = 96  # a large GPU is reasonably busy with so many
BARRIER_BYTES = 1024  # more than a program's barriers take of its shared memory


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a result that one program computes, and how."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """A cut of one product."""

    tile: Tile
    piece: int  # inputs summed from zero
    parallel: bool  # a program for each piece, not one for all


WIDE = Tile(128, 256, 64, num_warps=8, num_stages=4)  # only for one piece: there is no room for two accumulators
LARGE_TILES = (Tile(128, 128, 64, num_warps=8, num_stages=4),)
SMALL_TILES = (
    Tile(64, 128, 64, num_warps=4, num_stages=4),
    Tile(64, 64, 128, num_warps=4, num_stages=3),
    Tile(64, NARROWEST, 128, num_warps=4, num_stages=6),
)
# Float32 has no tensor cores here: products are unrolled, and larger tiles would spill.
FLOAT32_TILE = Tile(32, 64, 32, num_warps=4, num_stages=2)


def piece_for(n: int, k: int) -> int:
    """Inputs in a piece of a weight [n, k]: several pieces only where the narrowest tiles are too few programs."""
    pieces = 1
    while triton.cdiv(n, NARROWEST) * pieces < ENOUGH_PROGRAMS and k // (2 * pieces) >= SHORTEST_PIECE:
        pieces *= 2
    return int(triton.cdiv(triton.cdiv(k, pieces), PIECE_STEP) * PIECE_STEP)


def config_for(m: int, n: int, k: int, itemsize: int = 2) -> LinearConfig:
    """The cut for m rows: the largest tile that leaves enough programs."""
    piece = piece_for(n, k)
    pieces = triton.cdiv(k, piece)
    if itemsize > 2:
        tiles: tuple[Tile, ...] = (FLOAT32_TILE,)
    elif m <= SMALL_TILES[0].block_m:
        tiles = SMALL_TILES
    else:
        tiles = (*((WIDE,) if pieces == 1 else ()), *LARGE_TILES, *SMALL_TILES)
    for tile in tiles:
        programs = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
        if programs >= ENOUGH_PROGRAMS:
            return LinearConfig(tile, piece, parallel=False)
        if programs * pieces >= ENOUGH_PROGRAMS:
            return LinearConfig(tile, piece, parallel=True)
    return LinearConfig(tiles[-1], piece, parallel=pieces > 1)


def fitted(config: LinearConfig, itemsize: int, room: int) -> LinearConfig:
    """The cut with no more tiles in flight than have room in a program's shared memory; decides no bits."""
    tile = config.tile
    stages = (room - BARRIER_BYTES) // ((tile.block_m + tile.block_n) * tile.block_k * itemsize)
    if stages >= tile.num_stages:
        return config
    return replace(config, tile=replace(tile, num_stages=max(1, stages)))


GROUP_M = 8  # row tiles that are computed together, so that the columns of the weight they share stay in the cache
SUM_WIDTH = 1024


def invariant_linear(
    x: torch.Tensor,  # [rows, inputs], contiguous, lines a multiple of 16 bytes
    weight: torch.Tensor,  # [outputs, inputs], likewise
    bias: torch.Tensor | None = None,  # [outputs]
    *,
    out_dtype: torch.dtype | None = None,  # that of x when left out
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, accumulated in float32. [rows, outputs]"""
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty((m, n), dtype=out_dtype or x.dtype, device=x.device)
    if m == 0:
        return out
    chosen = config or fitted(config_for(m, n, k, x.dtype.itemsize), x.dtype.itemsize, shared_bytes())
    tile, pieces = chosen.tile, triton.cdiv(k, chosen.piece)
    split = chosen.parallel and pieces > 1
    target = torch.empty((pieces, m, n), dtype=torch.float32, device=x.device) if split else out
    _multiply[(triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), pieces if split else 1)](
        TensorDescriptor(x, [m, k], [x.stride(0), 1], [tile.block_m, tile.block_k]),
        TensorDescriptor(weight, [n, k], [weight.stride(0), 1], [tile.block_n, tile.block_k]), None if split else bias,
        target, m, n, k, chosen.piece, pieces,
        SINGLE=split or pieces == 1, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=GROUP_M,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if split:
        # In the order in which `_multiply` adds pieces when it goes through all of them.
        sum_splits[(triton.cdiv(n, SUM_WIDTH), m)](target, bias, out, n, SPLITS=pieces, BLOCK=SUM_WIDTH, OVERLAP=False)
    return out


# Shapes are no constants here: an engine has a dozen of them, and compiles each tile but once.
@triton.jit(do_not_specialize=["m", "pieces"])
def _multiply(
    x, weight, bias,
    out,  # [m, n], or [pieces, m, n] where each piece has programs of its own
    m: int, n: int, k: int,
    piece: int,  # inputs
    pieces: int,
    SINGLE: tl.constexpr,  # a program has one piece only
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of the result, of all pieces or of one."""
    tile = tl.program_id(0)
    columns = tl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * columns) * GROUP
    lines = tl.minimum(tl.cdiv(m, BLOCK_M) - first, GROUP)
    within = tile % (GROUP * columns)
    row, column = (first + within % lines) * BLOCK_M, within // lines * BLOCK_N

    own = tl.program_id(1)
    if SINGLE:
        first_k = own * piece
        last_k = tl.minimum(first_k + piece, k)
        total = _sum_piece(x, weight, row, column, first_k, last_k, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for number in range(pieces):
            first_k = number * piece
            last_k = tl.minimum(first_k + piece, k)
            total += _sum_piece(x, weight, row, column, first_k, last_k, BLOCK_M, BLOCK_N, BLOCK_K)

    line, at = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    if bias is not None:
        total += tl.load(bias + at, mask=at < n, other=0.0).to(tl.float32)[None, :]
    place = (own.to(tl.int64) * m + line)[:, None] * n + at[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(line < m)[:, None] & (at < n)[None, :])


@triton.jit
def _sum_piece(
    x, weight, row, column, first_k, last_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product over the inputs of one piece. Beyond the edges a descriptor reads zeros, which change no sum."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(first_k, last_k, BLOCK_K):
        acc = tl.dot(x.load([row, k]), weight.load([column, k]).T, acc, input_precision="ieee")
    return acc
