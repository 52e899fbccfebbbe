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
    small_rows: bool = False  # rows get 8 bits, as weights of 8 bits have them; else these take the type of the rows


@dataclass(frozen=True, slots=True)
class RowCut:
    """Of one product by rows."""

    block_n: int
    num_warps: int


GATE_UP_BY_ROWS = RowCut(4, 4)
DOWN_BY_ROWS = RowCut(4, 4)


INVARIANT_TILING = Tiling(64, False, True, Cut(64, 64, 4, 4), Cut(128, 64, 4, 3))  # for any number of tokens
INVARIANT_FP8 = Tiling(64, False, True, Cut(64, 128, 4, 4), Cut(128, 128, 4, 3), small_rows=True)


def config_for(tokens: int, top: int, experts: int, fp8: bool = False, grouped: bool = False) -> Tiling:
    """By how many rows an expert has on average. Up to some dozens the time is that of reading the weights. Of `fp8`
    weights a tile has at most one group of 128 inputs, whose sums take registers of their own if it is `grouped`."""
    rows = tokens * top / experts
    if fp8:
        if tokens <= MAX_TOKENS_UNSORTED or rows <= 10:
            return Tiling(16, True, False, Cut(64, 128, 4, 4), Cut(64, 128, 4, 5))
        if rows <= 24:
            return Tiling(32, True, False, Cut(64, 128, 4, 4), Cut(128, 128, 4, 4))
        if rows <= 96:
            return INVARIANT_FP8
        if grouped:
            return Tiling(128, False, True, Cut(64, 128, 8, 4), Cut(128, 128, 8, 3), small_rows=True)
        return Tiling(128, False, True, Cut(128, 128, 8, 4), Cut(256, 128, 8, 3), small_rows=True)
    if tokens <= MAX_TOKENS_UNSORTED or rows <= 10:
        return Tiling(16, True, False, Cut(64, 128, 4, 3), Cut(64, 64, 4, 5))
    if rows <= 24:
        return Tiling(32, True, False, Cut(64, 64, 4, 3), Cut(128, 64, 4, 5))
    if rows <= 96:
        return Tiling(64, False, True, Cut(64, 64, 4, 4), Cut(128, 64, 4, 3))
    return Tiling(128, False, True, Cut(128, 64, 8, 4), Cut(256, 64, 8, 3))


def w4_config_for(tokens: int, top: int, experts: int) -> Tiling:
    """Of weights of 4 bits: a tile has a block of 128 inputs, and the weight is the side that tensor cores take from
    registers, where it was given 16 bits."""
    rows = tokens * top / experts
    if tokens <= MAX_TOKENS_UNSORTED or rows <= 10:
        return Tiling(16, True, False, Cut(64, 128, 4, 4), Cut(64, 128, 4, 4))
    if rows <= 24:
        return Tiling(32, True, False, Cut(64, 128, 4, 3), Cut(64, 128, 4, 3))
    return Tiling(64, True, False, Cut(64, 128, 4, 3), Cut(128, 128, 8, 3))


def fitted(tiling: Tiling, row_bytes: int, weight_bytes: int, room: int) -> Tiling:
    """The tiling with no more in flight than shared memory holds; with shorter tiles, if it does not hold two. Bytes
    are those of a number."""
    rows = tiling.block_m * (1 if tiling.small_rows else row_bytes)
    return replace(
        tiling,
        gate_up=_fitted(tiling.gate_up, rows, 2 * weight_bytes, room),
        down=_fitted(tiling.down, rows, weight_bytes, room),
    )


def _fitted(cut: Cut, rows: int, weight_bytes: int, room: int) -> Cut:
    stage = (rows + weight_bytes * cut.block_n) * cut.block_k
    if 2 * stage > room:
        return _fitted(replace(cut, block_k=cut.block_k // 2), rows, weight_bytes, room)
    return replace(cut, num_stages=min(cut.num_stages, room // stage))
