"""From logits to the weights that a token is drawn with: temperature, top-k, top-p, min-p.

Weights are softmax numerators with the best token's at 1, so nothing is normalised: each filter compares with a sum
where the textbook divides by it. Filters apply in the order top-k, top-p, min-p, each over what the one before left;
what they drop gets the weight zero, in vocabulary order. Among equal weights the lower token id ranks first.

A row that must fail (NaN, or nothing left to choose) yields meaningless weights here, harms no other row, and is told
apart by the sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bough.sampling.rowwise import BLOCK, Workspace, block_sums, padded_width, sort_cpu_


def softmax_weights(logits: Tensor, peak: Tensor, temperature: Tensor, workspace: Workspace) -> Tensor:
    """exp((logit - peak) / temperature), padded with zeros to whole blocks. [n, V] -> [n, W]

    Subtracting the peak first keeps every exponent at or below zero, whatever the temperature.
    """
    rows, vocab_size = logits.shape
    weights = workspace.lend("weights", rows, padded_width(vocab_size))
    weights[:, vocab_size:] = 0.0
    used = weights[:, :vocab_size]
    torch.sub(logits, peak[:, None], out=used)
    used.div_(temperature[:, None]).exp_()
    return weights


def keep_top(weights: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int, workspace: Workspace) -> Tensor:
    """Drops, in place, what lies outside the `top_k` best or outside the smallest set of them that holds `top_p`."""
    limited = top_k < vocab_size
    total = block_sums(weights).sum(dim=-1)
    ranked = _largest(weights, total, top_k, top_p, limited, workspace)  # [n, w]
    last = ranked.shape[1] - 1
    mass = ranked.cumsum(dim=-1, dtype=torch.float64)
    mass_of_k = mass.gather(1, (top_k - 1).clamp_(max=last)[:, None]).squeeze(1)
    target = top_p * torch.where(limited, mass_of_k, total)
    target.masked_fill_(top_p >= 1.0, torch.inf)  # p = 1 keeps all, however the sums are rounded
    reached = torch.searchsorted(mass, target[:, None]).squeeze(1) + 1
    kept_count = torch.minimum(reached, top_k).clamp_(max=last + 1)
    threshold = ranked.gather(1, (kept_count - 1)[:, None])  # [n, 1], the least weight that is kept
    kept = _at_least(weights, threshold, workspace)
    if weights.device.type != "cpu":
        return weights.mul_(kept.mul_(_within_ties(weights, threshold, kept_count)))
    # Here a look at the data costs nothing, and it spares nearly every row the ranking of its ties.
    following = ranked.gather(1, kept_count.clamp(max=last)[:, None])
    rows = ((following == threshold) & (threshold > 0)).squeeze(1).nonzero().squeeze(1)
    if len(rows):
        kept[rows] *= _within_ties(weights[rows], threshold[rows], kept_count[rows])
    return weights.mul_(kept)


def keep_min_p(weights: Tensor, min_p: Tensor, workspace: Workspace) -> Tensor:
    """Drops, in place, what is less likely than `min_p` times the best token, whose weight is 1."""
    return weights.mul_(_at_least(weights, min_p[:, None], workspace))


def _largest(
    weights: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, limited: Tensor, workspace: Workspace
) -> Tensor:
    """The weights of each row in descending order, as far as the filters need them. [n, W] -> [n, w]

    On a CPU, weights that are certainly not needed become zeros first, which sort at once, and columns in which only
    zeros stand are cut off. Elsewhere the width must not depend on the data, or the host would wait for it.
    """
    if weights.device.type != "cpu":
        return weights.sort(dim=-1, descending=True).values
    floors = _mass_floors(total, top_p, weights.shape[1])
    if limited.any():
        floors = torch.where(limited, _rank_floors(weights, top_k), floors)
    ascending = sort_cpu_(_at_least(weights, floors[:, None], workspace).mul_(weights))
    zeros = torch.searchsorted(ascending, ascending.new_zeros((len(ascending), 1)), right=True)
    return ascending[:, min(int(zeros.min()), weights.shape[1] - 1) :].flip(1)


def _rank_floors(weights: Tensor, top_k: Tensor) -> Tensor:
    """Per row, a weight that is at most the k-th largest: the k-th largest of the blocks' maxima. [n]"""
    maxima = sort_cpu_(weights.view(len(weights), -1, BLOCK).amax(dim=-1))
    blocks = maxima.shape[1]
    kth = maxima.gather(1, (blocks - top_k).clamp_(min=0)[:, None]).squeeze(1)
    return kth.masked_fill_(top_k > blocks, 0.0)


def _mass_floors(total: Tensor, top_p: Tensor, width: int) -> Tensor:
    """Per row, a weight such that the tokens above it hold `top_p` of the total. [n]

    Tokens lighter than (1 - p) / width of the total sum to less than 1 - p. Half of that, because sums are rounded.
    """
    return ((1.0 - top_p) * total * (0.5 / width)).float()


def _at_least(weights: Tensor, bounds: Tensor, workspace: Workspace) -> Tensor:
    """Ones where a weight reaches its row's bound, zeros elsewhere; valid until the next call. [n, w], [n, 1] -> [n, w]

    In the weights' own type, because a product with it is far cheaper on CPUs than filling by a mask of booleans.
    """
    return torch.ge(weights, bounds, out=workspace.lend("comparison", *weights.shape))


def _within_ties(weights: Tensor, threshold: Tensor, kept_count: Tensor) -> Tensor:
    """False for weights that equal the threshold but come too late in the vocabulary to be kept. [n, w] bool"""
    ties = weights == threshold
    heavier = (weights > threshold).sum(dim=-1)
    rank = ties.cumsum(dim=-1, dtype=torch.int32)
    return ~ties | (rank <= (kept_count - heavier)[:, None])
