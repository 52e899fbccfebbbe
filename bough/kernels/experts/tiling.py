"""How the expert products are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_TOKENS_BY_ROWS = 2  # beyond, an expert that two tokens share would be read twice
MAX_TOKENS_UNSORTED = 16  # rows of the smallest tile

MAX_TOKENS_NORMED = 512  # beyond, norm and router are faster as launches of their own


@dataclass(frozen=True, slots=True)
class Cut:
    """Of one product by tiles."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of both products of a layer; they have the same rows."""

    block_m: int
    swap: bool  # the weight is the side of which tensor cores take 64 rows
    described: bool  # weights are read through tensor descriptors, which spares the threads their addresses
    gate_up: Cut
    down: Cut


@dataclass(frozen=True, slots=True)
class RowCut:
    """Of one product by rows."""

    block_n: int
    num_warps: int


GATE_UP_BY_ROWS = RowCut(4, 4)
DOWN_BY_ROWS = RowCut(4, 4)


INVARIANT_TILING = Tiling(64, False, True, Cut(64, 64, 4, 4), Cut(128, 64, 4, 3))  # for any number of tokens


def config_for(tokens: int, top: int, experts: int) -> Tiling:
    """By how many rows an expert has on average. Up to some dozens the time is that of reading the weights."""
    rows = tokens * top / experts
    if tokens <= MAX_TOKENS_UNSORTED or rows <= 10:
        return Tiling(16, True, False, Cut(64, 128, 4, 3), Cut(64, 64, 4, 5))
    if rows <= 24:
        return Tiling(32, True, False, Cut(64, 64, 4, 3), Cut(128, 64, 4, 5))
    if rows <= 96:
        return Tiling(64, False, True, Cut(64, 64, 4, 4), Cut(128, 64, 4, 3))
    return Tiling(128, False, True, Cut(128, 64, 8, 4), Cut(256, 64, 8, 3))


def fitted(tiling: Tiling, itemsize: int, room: int) -> Tiling:
    """The tiling with no more in flight than shared memory holds; with shorter tiles, if it does not hold two."""
    return replace(
        tiling,
        gate_up=_fitted(tiling.gate_up, tiling.block_m, 2, itemsize, room),
        down=_fitted(tiling.down, tiling.block_m, 1, itemsize, room),
    )


def _fitted(cut: Cut, block_m: int, matrices: int, itemsize: int, room: int) -> Cut:
    stage = (block_m + matrices * cut.block_n) * cut.block_k * itemsize
    if 2 * stage > room:
        return _fitted(replace(cut, block_k=cut.block_k // 2), block_m, matrices, itemsize, room)
    return replace(cut, num_stages=min(cut.num_stages, room // stage))
