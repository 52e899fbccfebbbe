"""Sampling on a CPU: from logits to weights (temperature, top-k, top-p, min-p), and from weights to a token.

Weights are softmax numerators with the best token's at 1: each filter compares with a sum where the textbook divides by
it. Filters apply in the order top-k, top-p, min-p, each over what the one before left; among equal weights the lower
token id ranks first. A row that must fail yields meaningless weights here and harms no other row. Sorting and argmax
are numpy's, ten times as fast on CPUs as torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # divides nearly every vocabulary in use; two levels of about equal width search fastest


class Workspace:
    """Large float32 buffers, by name, for use within one step. They are kept and grow to the largest batch seen: fresh
    memory costs a fault per page, which is more than the arithmetic done in it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def lend(self, name: str, rows: int, width: int) -> Tensor:
        """An uninitialised [rows, width] tensor, until the next loan under this name."""
        size = rows * width
        if name not in self._kept or self._kept[name].numel() < size:
            self._kept[name] = torch.empty(size)
        return self._kept[name][:size].view(rows, width)


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its first place. NaN counts as largest, so it shows in the value."""
    indices = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, indices[:, None]).squeeze(1), indices


def softmax_weights(logits: Tensor, peak: Tensor, temperature: Tensor, workspace: Workspace) -> Tensor:
    """exp((logit - peak) / temperature), padded with zeros to whole blocks. [n, V] -> [n, W]

    Subtracting the peak first keeps every exponent at or below zero, whatever the temperature.
    """
    rows, vocab_size = logits.shape
    weights = workspace.lend("weights", rows, -(-vocab_size // BLOCK) * BLOCK)
    weights[:, vocab_size:] = 0.0
    used = weights[:, :vocab_size]
    torch.sub(logits, peak[:, None], out=used)
    used.div_(temperature[:, None]).exp_()
    return weights


def keep_top(weights: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int, workspace: Workspace) -> Tensor:
    """Drops, in place, what lies outside the `top_k` best or outside the smallest set of them that holds `top_p`."""
    limited = top_k < vocab_size
    total = _block_sums(weights).sum(dim=-1)
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
    # Only rows whose last kept weight is also the next one's have ties to rank: nearly none.
    following = ranked.gather(1, kept_count.clamp(max=last)[:, None])
    rows = ((following == threshold) & (threshold > 0)).squeeze(1).nonzero().squeeze(1)
    if len(rows):
        kept[rows] *= _within_ties(weights[rows], threshold[rows], kept_count[rows])
    return weights.mul_(kept)


def keep_min_p(weights: Tensor, min_p: Tensor, workspace: Workspace) -> Tensor:
    """Drops, in place, what is less likely than `min_p` times the best token, whose weight is 1."""
    return weights.mul_(_at_least(weights, min_p[:, None], workspace))


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row at which the cumulative weight passes `number` of the total. [n, W], [n] -> [n] int64

    Tokens stand in vocabulary order and are searched in two levels, the block first and then the place inside it, so
    that no row's whole vocabulary is summed step by step.
    """
    rows = len(weights)
    mass = _block_sums(weights).cumsum(dim=-1)
    target = numbers[:, None] * mass[:, -1:]
    block = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)  # [n, 1]
    before = mass.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    inside = weights.view(rows, -1, BLOCK).gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    place = torch.searchsorted(inside.cumsum(dim=-1, dtype=torch.float64), target - before, right=True)
    # The block's sum and the steps through it are rounded differently: never step past its last token with a weight.
    places = torch.arange(BLOCK)
    last = torch.where(inside > 0, places, 0).amax(dim=-1, keepdim=True)
    return (block * BLOCK + torch.minimum(place, last)).squeeze(1)


def _largest(
    weights: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, limited: Tensor, workspace: Workspace
) -> Tensor:
    """The weights of each row in descending order, as far as the filters need them. [n, W] -> [n, w]

    Weights that are certainly not needed become zeros first, which sort at once, and columns of nothing but zeros are
    cut off.
    """
    floors = _mass_floors(total, top_p, weights.shape[1])
    if limited.any():
        floors = torch.where(limited, _rank_floors(weights, top_k), floors)
    ascending = _sort_(_at_least(weights, floors[:, None], workspace).mul_(weights))
    zeros = torch.searchsorted(ascending, ascending.new_zeros((len(ascending), 1)), right=True)
    return ascending[:, min(int(zeros.min()), weights.shape[1] - 1) :].flip(1)


def _rank_floors(weights: Tensor, top_k: Tensor) -> Tensor:
    """Per row, a weight that is at most the k-th largest: the k-th largest of the blocks' maxima. [n]"""
    maxima = _sort_(weights.view(len(weights), -1, BLOCK).amax(dim=-1))
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


def _block_sums(weights: Tensor) -> Tensor:
    """Sums over blocks of `BLOCK`, in double precision for adding up further. [n, W] -> [n, W / BLOCK]"""
    return weights.view(len(weights), -1, BLOCK).sum(dim=-1).double()


def _sort_(values: Tensor) -> Tensor:
    """Sorts each row in place, in ascending order."""
    values.numpy().sort(axis=-1)
    return values
