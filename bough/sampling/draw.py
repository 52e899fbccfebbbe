"""The token that a row's random number falls on.

The number is made by `bough.kernels.sampling.uniform` of (seed, output position): the same request draws the same token
in any batch, at any place in it, and again after a retraction. The token is found by the inverse of the cumulative
weights in vocabulary order, in two levels: the block first, then the place inside it, so that no row's whole vocabulary
is summed step by step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bough.sampling.rowwise import BLOCK, block_sums


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
