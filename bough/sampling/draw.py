"""One random number per row, and the token it falls on.

The number is a function of (seed, output position): the same request draws the same token in any batch, at any place in
it, and again after a retraction. The token is found by the inverse of the cumulative weights in vocabulary order, in
two levels: the block first, then the place inside it, so that no row's whole vocabulary is summed step by step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bough.core.seeds import GOLDEN_GAMMA, MIX_LAST_SHIFT, MIX_STEPS, as_int64
from bough.sampling.rowwise import BLOCK, block_sums

UNIFORM_BITS = 52  # one fewer than a double holds: u * total then rounds below total


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Random numbers in [0, 1), one for each pair of int64 seed and position. [n] float64"""
    gamma = as_int64(GOLDEN_GAMMA)
    bits = _mix64(_mix64(seeds) + (positions + 1) * gamma)
    return _shift_right(bits, 64 - UNIFORM_BITS).double() * 2.0**-UNIFORM_BITS


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row at which the cumulative weight passes `number` of the total. [n, W], [n] -> [n] int64"""
    rows = len(weights)
    mass = block_sums(weights).cumsum(dim=-1)
    target = numbers[:, None] * mass[:, -1:]
    block = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)  # [n, 1]
    before = mass.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    inside = weights.view(rows, -1, BLOCK).gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    place = torch.searchsorted(inside.cumsum(dim=-1, dtype=torch.float64), target - before, right=True)
    # The block's sum and the steps through it are rounded differently: never step past its last token with a weight.
    places = torch.arange(BLOCK, device=weights.device)
    last = torch.where(inside > 0, places, 0).amax(dim=-1, keepdim=True)
    return (block * BLOCK + torch.minimum(place, last)).squeeze(1)


def _mix64(values: Tensor) -> Tensor:
    """`bough.core.seeds.mix64` on int64 tensors, whose products wrap around as those of unsigned integers do."""
    for shift, multiplier in MIX_STEPS:
        values = (values ^ _shift_right(values, shift)) * as_int64(multiplier)
    return values ^ _shift_right(values, MIX_LAST_SHIFT)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """A shift that brings in zeros; that of signed integers brings in copies of the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
