# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""Small device functions of the sampling kernels: random numbers, orderable keys, and sums above a bound.

A *key* is an integer that orders like the logit it is made of, so that a threshold is found by halving a range of
integers. Logits of 16 bits leave the low bits of a float32 unused; `SHIFT` drops them and saves that many halvings.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bough.core.seeds import GOLDEN_GAMMA, MIX_LAST_SHIFT, MIX_STEPS
from bough.kernels.sampling.rows import UNIFORM_BITS

GAMMA = tl.constexpr(GOLDEN_GAMMA)
FIRST_SHIFT, FIRST_MULTIPLIER = tl.constexpr(MIX_STEPS[0][0]), tl.constexpr(MIX_STEPS[0][1])
SECOND_SHIFT, SECOND_MULTIPLIER = tl.constexpr(MIX_STEPS[1][0]), tl.constexpr(MIX_STEPS[1][1])
LAST_SHIFT = tl.constexpr(MIX_LAST_SHIFT)
DROPPED_BITS = tl.constexpr(64 - UNIFORM_BITS)
UNIT = tl.constexpr(2.0**-UNIFORM_BITS)


@triton.jit
def mix64(value):
    """`bough.core.seeds.mix64` of a uint64."""
    value = (value ^ (value >> FIRST_SHIFT)) * FIRST_MULTIPLIER
    value = (value ^ (value >> SECOND_SHIFT)) * SECOND_MULTIPLIER
    return value ^ (value >> LAST_SHIFT)


@triton.jit
def uniform(seed, position):
    """The float64 in [0, 1) that belongs to this int64 seed and output position."""
    counted = (position + 1).to(tl.uint64, bitcast=True) * GAMMA
    bits = mix64(mix64(seed.to(tl.uint64, bitcast=True)) + counted)
    return (bits >> DROPPED_BITS).to(tl.int64).to(tl.float64) * UNIT


@triton.jit
def key_of(logit, SHIFT: tl.constexpr):
    """An int32 that orders like the float32 logit, which is not NaN; both zeros have the same."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def logit_of(key, SHIFT: tl.constexpr):
    """The float32 logit whose key this is."""
    spread = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (spread ^ ((spread >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(logit, peak, scale):
    """A softmax numerator: 1 for the best token, 0 for a masked one."""
    return tl.exp((logit - peak) * scale)


@triton.jit
def load_tiles(tile_max, tile_sum, tiles, scale, TILES: tl.constexpr):
    """A row's tiles as the scan left them: each one's best logit and its float64 mass; the peak over all. [TILES]

    A tile's sum is relative to its own best logit. Float64 costs nothing on so few numbers, and keeps the cumulative
    masses as exact as the 52 bits of the random number that falls on them.
    """
    places = tl.arange(0, TILES)
    tops = tl.load(tile_max + places, mask=places < tiles, other=float("-inf"))
    sums = tl.load(tile_sum + places, mask=places < tiles, other=0.0)
    peak = tl.max(tops, 0)
    masses = tl.where(sums > 0.0, sums * weight_of(tops, peak, scale), 0.0).to(tl.float64)
    return tops, masses, peak


@triton.jit
def above(source, length, key, peak, scale, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the logits at `source` have a larger key than this one, and their mass. int64, float64"""
    count = tl.full((), 0, tl.int64)
    mass = tl.full((), 0.0, tl.float64)
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logits = tl.load(source + at, mask=at < length, other=float("-inf")).to(tl.float32)
        larger = key_of(logits, SHIFT) > key
        count += tl.sum(larger.to(tl.int32), 0)
        mass += tl.sum(tl.where(larger, weight_of(logits, peak, scale), 0.0), 0).to(tl.float64)
    return count, mass
