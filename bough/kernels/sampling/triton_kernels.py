# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""The first and the last kernel of a sampling step.

`scan_kernel` reads every logit once and leaves, per tile of the vocabulary, the best logit and the tile's mass. That is
all that a greedy or an unfiltered row needs: `pick_kernel` finds the tile, and reads that one tile again. Rows with
filters have `triton_filters.gather_kernel` in between.

A row's result never depends on its company: what is summed, and in which order, is fixed by the tile and block sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bough.kernels.sampling.triton_filters import draw_filtered
from bough.kernels.sampling.triton_tools import load_tiles, uniform, weight_of


# Counts are left general, and so is where the rows' numbers begin: no batch must wait for a kernel of its own.
@triton.jit(do_not_specialize=["tiles", "steps"], do_not_specialize_on_alignment=["rows"])
def scan_kernel(
    logits, stride, rows, random, temperature,
    tile_max,  # [n, tiles]
    tile_sum,  # [n, tiles], left alone for rows that are greedy
    vocab_size, tiles, steps,
    STEP: tl.constexpr,  # tiles read at once
    TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    drawn = tl.load(random + row)
    scale = 1.0 / tl.load(temperature + row)
    line = logits + place * stride
    for step in range(steps):
        numbers = (tl.program_id(1) * steps + step) * STEP + tl.arange(0, STEP)
        at = numbers[:, None] * TILE + tl.arange(0, TILE)[None, :]
        values = tl.load(line + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        values = tl.where(values != values, float("inf"), values)  # NaN fails the row just as +inf does
        tops = tl.max(values, 1)
        tl.store(tile_max + place * tiles + numbers, tops, mask=numbers < tiles)
        if drawn:
            origin = tl.where(tops == float("-inf"), 0.0, tops)
            sums = tl.sum(weight_of(values, origin[:, None], scale), 1)
            tl.store(tile_sum + place * tiles + numbers, sums, mask=numbers < tiles)


@triton.jit
def first_best(line, tops, peak, vocab_size, TILES: tl.constexpr, TILE: tl.constexpr):
    """The first token whose logit is the peak."""
    tile = tl.min(tl.where(tops == peak, tl.arange(0, TILES), TILES), 0)
    at = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(line + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(logits == peak, at, vocab_size), 0)


@triton.jit
def draw_any(line, masses, number, peak, scale, vocab_size, TILES: tl.constexpr, TILE: tl.constexpr):
    """The token at which the cumulative weight passes `number` of the total: the tile first, then the place in it."""
    places = tl.arange(0, TILES)
    passed = tl.cumsum(masses, 0) <= number * tl.sum(masses, 0)
    tile = tl.minimum(tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(masses > 0.0, places, 0), 0))
    left = number * tl.sum(masses, 0) - tl.sum(tl.where(places < tile, masses, 0.0), 0)
    at = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(line + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    weights = weight_of(logits, peak, scale).to(tl.float64)
    inside = tl.sum((tl.cumsum(weights, 0) <= left).to(tl.int32), 0)
    # The tile's sum and the steps through it are rounded differently: never step past its last token with a weight.
    return tl.minimum(tile * TILE + inside, tl.max(tl.where(weights > 0.0, at, 0), 0))


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["rows"])
def pick_kernel(
    logits, stride, rows, random, temperature, top_k, top_p, min_p, seed, generated, tile_max, tile_sum, floors, counts,
    found, found_ids,
    tokens,  # [n] int64
    bad,  # [n] bool
    vocab_size, tiles, groups,
    batch,  # of lines in columns: how many a column has; 0: all are of rows of their own
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    line = logits + place * stride
    scale = 1.0 / tl.load(temperature + row)
    tops, masses, peak = load_tiles(tile_max + place * tiles, tile_sum + place * tiles, tiles, scale, TILES)
    usable = tl.abs(peak) < float("inf")
    position = tl.load(generated + row)
    if batch:
        position += place // batch
    else:
        tl.store(generated + row, position + 1)
    token = tl.full((), 0, tl.int32)
    if usable:
        if tl.load(random + row):
            number = uniform(tl.load(seed + row), position)
            token = draw_any(line, masses, number, peak, scale, vocab_size, TILES, TILE)
            if FILTERED:  # by itself, so that it is decided when the kernel is compiled
                k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
                if (k < vocab_size) | (p < 1.0) | (least > 0.0):
                    token = draw_filtered(
                        line,
                        found + place * groups * SEGMENT,
                        found_ids + place * groups * SEGMENT,
                        counts + place * groups,
                        tl.load(floors + place),
                        groups,
                        tl.sum(masses, 0),
                        peak,
                        scale,
                        k,
                        p,
                        least,
                        number,
                        vocab_size,
                        SHIFT,
                        GROUPS,
                        SEGMENT,
                        BLOCK,
                    )
        else:
            token = first_best(line, tops, peak, vocab_size, TILES, TILE)
    tl.store(tokens + place, token.to(tl.int64))
    tl.store(bad + place, usable == 0)
