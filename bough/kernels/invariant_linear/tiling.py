"""How a product is cut. What decides bits depends on the weight's shape alone; the rest may follow the number of rows.

The inputs are cut into *pieces*. Each is summed from zero in steps of 16 inputs, the depth of one tensor core
instruction, and the sums of the pieces are added in order. An output's bits depend on that order alone: a few rows fill
the device by their pieces, many rows by their tiles. Tiles have at least 64 rows, because smaller ones use other
instructions, which need not round alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    while _up(n, NARROWEST) * pieces < ENOUGH_PROGRAMS and k // (2 * pieces) >= SHORTEST_PIECE:
        pieces *= 2
    return _up(_up(k, pieces), PIECE_STEP) * PIECE_STEP


def config_for(m: int, n: int, k: int, itemsize: int = 2) -> LinearConfig:
    """The cut for m rows: the largest tile that leaves enough programs."""
    piece = piece_for(n, k)
    pieces = _up(k, piece)
    if itemsize > 2:
        tiles: tuple[Tile, ...] = (FLOAT32_TILE,)
    elif m <= SMALL_TILES[0].block_m:
        tiles = SMALL_TILES
    else:
        tiles = (*((WIDE,) if pieces == 1 else ()), *LARGE_TILES, *SMALL_TILES)
    for tile in tiles:
        programs = _up(m, tile.block_m) * _up(n, tile.block_n)
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


def _up(count: int, size: int) -> int:
    return -(-count // size)
