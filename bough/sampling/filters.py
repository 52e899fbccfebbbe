"""Sampling on a CPU without native kernels: from logits to weights (temperature, top-k, top-p, min-p), and from weights
to a token.

Weights are softmax numerators with the best token's at 1: each filter compares with a sum where the textbook divides by
it. Filters apply in the order top-k, top-p, min-p, each over what the one before left; among equal weights the lower
token id ranks first. A row that must fail yields meaningless weights here and harms no other row. Sorting and argmax
are numpy's, ten times as fast on CPUs as torch's.
"""

import torch
from torch import Tensor


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its first place. NaN counts as largest, so it shows in the value."""
    indices = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, indices[:, None]).squeeze(1), indices


def softmax_weights(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """exp((logit - peak) / temperature). [n, V]

    Subtracting the peak first keeps every exponent at or below zero, whatever the temperature.
    """
    return (logits - peak[:, None]).div_(temperature[:, None]).exp_()


def keep_top(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Drops, in place, what lies outside the `top_k` best or outside the smallest set of them that holds `top_p`."""
    order = torch.from_numpy((-weights.numpy()).argsort(axis=-1, kind="stable"))
    ranked = weights.gather(1, order)
    mass = ranked.cumsum(dim=-1, dtype=torch.float64)
    target = top_p[:, None] * mass.gather(1, (top_k[:, None] - 1).clamp_(max=weights.shape[1] - 1))
    target.masked_fill_(top_p[:, None] >= 1.0, torch.inf)  # p = 1 keeps all, however the sums are rounded
    kept_count = torch.minimum(torch.searchsorted(mass, target) + 1, top_k[:, None])
    ranked.masked_fill_(torch.arange(weights.shape[1]) >= kept_count, 0.0)
    return weights.scatter_(1, order, ranked)


def keep_min_p(weights: Tensor, min_p: Tensor) -> Tensor:
    """Drops, in place, what is less likely than `min_p` times the best token, whose weight is 1."""
    return weights.mul_(weights >= min_p[:, None])


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row at which the cumulative weight passes `number` of the total. [n, V], [n] -> [n] int64"""
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    places = torch.searchsorted(mass, numbers[:, None] * mass[:, -1:], right=True)
    return places.clamp_(max=weights.shape[1] - 1).squeeze(1)
