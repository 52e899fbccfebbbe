"""Sampling in plain torch and float64, by a full sort: the definition that the kernels are compared with.

Filters apply in the order top-k, top-p, min-p, each over what the one before left; equal logits rank by token id.
Slow on purpose; CPUs sample with `bough.sampling.sampler` instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bough.kernels.sampling.rows import RowParameters, uniform


def sample_rows(
    logits: Tensor,  # [n, V]
    rows: Tensor,  # [n] int64, row numbers
    parameters: RowParameters,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """One token per row, and which rows had none because of NaN, +inf or nothing but -inf; those get token 0.

    `filtered` promises that some row may have a filter; without it none is applied. Each row's `generated` grows by
    one. Returns (tokens, bad).
    """
    wide = logits.double()
    peak, best = wide.max(dim=-1)
    failed = peak.isfinite().logical_not_()
    weights = ((wide - peak[:, None]) / parameters.temperature[rows, None].double()).exp_()
    if filtered:
        top_k, top_p = parameters.top_k[rows, None], parameters.top_p[rows, None]
        weights *= kept_mask(wide, weights, top_k, top_p, parameters.min_p[rows, None].double())
    mass = weights.cumsum(dim=-1)
    number = uniform(parameters.seed[rows], parameters.generated[rows])
    drawn = torch.searchsorted(mass, number[:, None] * mass[:, -1:], right=True).squeeze(1)
    chosen = torch.where(parameters.random[rows], drawn.clamp_(max=logits.shape[1] - 1), best).masked_fill_(failed, 0)
    parameters.generated[rows] += 1
    return chosen, failed


def kept_mask(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens the filters leave. [n, V], [n, V], [n, 1] each -> [n, V] bool"""
    vocab_size = logits.shape[1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    mass = weights.gather(1, order).cumsum(dim=-1)
    mass_of_k = mass.gather(1, (top_k - 1).clamp(0, vocab_size - 1))
    target = (top_p * mass_of_k).masked_fill_(top_p >= 1.0, torch.inf)
    count = torch.minimum(torch.searchsorted(mass, target) + 1, top_k)
    ranks = torch.arange(vocab_size, device=logits.device).expand_as(order)
    kept = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, order, ranks < count)
    return kept & (weights >= min_p)
