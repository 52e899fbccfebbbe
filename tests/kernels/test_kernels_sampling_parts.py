"""The device functions below the sampling kernels: random numbers, keys, and the exact sets that filters keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from bough.kernels.sampling.device import find_floor, find_threshold, key_of, load_tiles, logit_of, scan_kernel, uniform
from bough.kernels.sampling.rows import uniform as torch_uniform
from tests.kernels.references.sampling import kept_mask

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on whose scalars the interpreter computes

SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
TILE = 32


@triton.jit
def uniform_kernel(seeds, positions, out):
    place = tl.program_id(0)
    tl.store(out + place, uniform(tl.load(seeds + place), tl.load(positions + place)))


@triton.jit
def key_kernel(logits, keys, back, N: tl.constexpr, SHIFT: tl.constexpr):
    at = tl.arange(0, N)
    key = key_of(tl.load(logits + at).to(tl.float32), SHIFT)
    tl.store(keys + at, key)
    tl.store(back + at, logit_of(key, SHIFT))


@triton.jit
def threshold_kernel(
    logits,
    tile_max,
    tile_sum,
    top_k,
    top_p,
    min_p,
    floors,
    bounds,
    ties,
    vocab_size,
    tiles,
    SHIFT: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The search of a row with filters, over all of its logits, at temperature one."""
    row = tl.program_id(0)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    tops, masses, peak = load_tiles(tile_max + row * tiles, tile_sum + row * tiles, tiles, 1.0, TILES)
    floor = find_floor(tops, masses, peak, 1.0, k, p, least, vocab_size, SHIFT, TILE)
    length = tl.full((), 0, tl.int32) + vocab_size
    bound, count = find_threshold(
        logits + row * vocab_size, length, floor, tl.sum(masses, 0), peak, 1.0, k, p, vocab_size, SHIFT, 512
    )
    tl.store(floors + row, floor)
    tl.store(bounds + row, bound)
    tl.store(ties + row, count)


def test_random_numbers_are_those_of_the_host(device: torch.device) -> None:
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1, 77], device=device)
    positions = torch.tensor([0, 1, 2**31, 5, 123456, 0, 3], device=device)
    found = torch.empty(len(seeds), dtype=torch.float64, device=device)
    uniform_kernel[(len(seeds),)](seeds, positions, found)
    assert torch.equal(found, torch_uniform(seeds, positions))


@pytest.mark.parametrize("dtype", list(SHIFTS))
def test_keys_order_like_their_logits_and_lead_back(dtype: torch.dtype, device: torch.device) -> None:
    special = torch.tensor([0.0, 1e-7, -1e-7, 1.0, -1.0, torch.inf, -torch.inf, 3.0])
    values = torch.cat((torch.randn(56, generator=torch.Generator().manual_seed(0)) * 9, special))
    logits = values.to(device=device, dtype=dtype)
    keys = torch.empty(64, dtype=torch.int32, device=device)
    back = torch.empty(64, device=device)
    key_kernel[(1,)](logits, keys, back, N=64, SHIFT=SHIFTS[dtype])
    assert torch.equal(back.to(dtype), logits)
    line, order = logits.float(), keys.long()
    assert torch.equal(line[:, None] < line[None], order[:, None] < order[None])


def search(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels find: the keys of floors and bounds, and how many ties are kept. [n] each"""
    n, vocab_size = logits.shape
    device, shift, tiles = logits.device, SHIFTS[logits.dtype], -(-vocab_size // TILE)
    tile_max, tile_sum = torch.empty(2, n, tiles, device=device)
    rows, temperature = torch.arange(n, device=device), torch.ones(n, device=device)
    random = torch.ones(n, dtype=torch.bool, device=device)
    scan_kernel[n, 1](
        logits, vocab_size, rows, random, temperature, tile_max, tile_sum, vocab_size, tiles, tiles, STEP=1, TILE=TILE
    )
    floors, bounds = torch.empty(2, n, dtype=torch.int32, device=device)
    ties = torch.empty(n, dtype=torch.float64, device=device)
    width = triton.next_power_of_2(tiles)
    limits = (top_k, top_p, min_p)
    threshold_kernel[(n,)](
        logits,
        tile_max,
        tile_sum,
        *limits,
        floors,
        bounds,
        ties,
        vocab_size,
        tiles,
        SHIFT=shift,
        TILES=width,
        TILE=TILE,
    )
    return floors, bounds, ties


def keys_of(logits: Tensor) -> Tensor:
    """`key_of` in torch, for logits without negative zeros."""
    bits = logits.float().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFTS[logits.dtype]


limits = st.tuples(
    st.sampled_from([10**6, 2, 3, 17, 100]),
    st.sampled_from([1.0, 0.999, 0.95, 0.7, 0.31, 0.01]),
    st.sampled_from([0.0, 0.0, 0.043, 0.61]),
).filter(lambda limit: limit != (10**6, 1.0, 0.0))


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(0, 2**32), st.integers(1, 6), limits), min_size=2, max_size=3),
    st.sampled_from([1, 33, 128, 301]),
    st.sampled_from([0, 1, 6]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_kept_sets(
    rows: list[tuple[int, int, tuple[int, float, float]]], vocab_size: int, digits: int, dtype: torch.dtype
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [np.round(np.random.default_rng(seed).normal(size=vocab_size) * spread, digits) for seed, spread, _ in rows]
    logits = torch.tensor(np.array(lines) + 0.0, device=device).to(dtype)
    top_k = torch.tensor([min(limit[0], vocab_size) for _, _, limit in rows], device=device)
    top_p = torch.tensor([limit[1] for _, _, limit in rows], dtype=torch.float64, device=device)
    min_p = torch.tensor([limit[2] for _, _, limit in rows], device=device)
    floors, bounds, ties = (found[:, None] for found in search(logits, top_k, top_p, min_p))

    keys, wide = keys_of(logits), logits.double()
    tied = keys == bounds
    weights = (wide - wide.amax(dim=-1, keepdim=True)).exp()
    least = min_p[:, None].double()
    kept = ((keys > bounds) | (tied & (tied.cumsum(dim=-1) <= ties))) & (weights >= least)
    for place, (p, mass) in enumerate(zip(top_p.tolist(), weights, strict=True)):
        at = slice(place, place + 1)
        # Where a sum ends within rounding of p, either side of it is right.
        allowed = [
            kept_mask(wide[at], weights[at], top_k[at, None], torch.full_like(top_p[at, None], near), least[at])
            for near in ([p] if p == 1.0 else [p - 1e-5, p, min(p + 1e-5, 1 - 1e-9)])
        ]
        assert any(torch.equal(kept[at], mask) for mask in allowed), mass
        assert bool((keys[at][kept[at]] >= floors[place]).all())
