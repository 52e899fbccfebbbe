"""One sampling step for a whole batch: logits in, one token per row out.

A greedy batch pays for an argmax. Other needs are met for the rows that have them, chosen from the host's flags. A row
whose logits are unusable is reported as bad, alone. On CUDA devices the same happens in two or three launches for all
rows; rows that adjust their logits are drawn by launches of their own. State lives in `SamplingState`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.core.plan import IntArray
from bough.kernels.logits.reference import forbid_tokens_
from bough.kernels.sampling.rows import uniform
from bough.sampling.adjust import adjust, adjust_on_device
from bough.sampling.filters import best, draw, keep_min_p, keep_top, softmax_weights
from bough.sampling.masks import BatchMasks, maskable
from bough.sampling.slots import to_device
from bough.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens, still on the device."""

    tokens: Tensor  # [n] int64; 0 where bad
    bad: Tensor  # [n] bool: the logits held NaN or +inf, or no token was possible


def sample(state: SamplingState, logits: Tensor, rows: IntArray, masks: BatchMasks | None = None) -> Sampled:
    """Draws the next token of each of `rows`, which are distinct, from `logits` [n, V] and counts it in the state.

    Rows with a bias, penalties, barred tokens or a mask may be overwritten in `logits`, but never where one of them
    wants logprobs: for those rows `logits` still holds the model's own values afterwards.
    """
    if state.device.type == "cuda":
        numbers = to_device(rows.astype(np.int64), state.device)
        return sample_rows_on_device(state, logits, numbers, rows, masks=masks)
    logits = _shape(state, logits, rows, masks)
    peak, tokens = best(logits)
    bad = peak.isfinite().logical_not_()
    random = np.flatnonzero(state.flags.random[rows])
    if len(random):
        at = torch.from_numpy(random)
        tokens.index_copy_(0, at, _draw(state, rows[random], logits[at], peak[at]))
    tokens = state.agree(tokens.masked_fill_(bad, 0))
    state.advance(rows, tokens)
    return Sampled(tokens, bad)


def sample_rows_on_device(
    state: SamplingState, logits: Tensor, rows: Tensor, numbers: IntArray, masks: BatchMasks | None = None
) -> Sampled:
    """`sample` for rows whose numbers are on the device already, as int64; `numbers` are the same on the host.

    `logits` may have 16 bits. The scratch row may stand any number of times. Nothing is waited for. Rows with logits of
    their own (`AdjustedRows`) are drawn from those, and in their places in the batch stands the scratch row. Filters
    cost a launch, which is left out if no row has one.
    """
    from bough.kernels.logits.triton import count_tokens_  # Triton is installed only where it has a device to drive
    from bough.kernels.sampling.triton import sample_rows

    def draw_from(lines: Tensor, of: Tensor, numbers: IntArray) -> Sampled:
        tokens, bad = sample_rows(lines, of, state.parameters, bool(state.flags.filtered(numbers).any()))
        return Sampled(state.agree(tokens), bad)

    adjusted = adjust_on_device(state, logits, numbers, masks)
    state.lift_bars(numbers)
    if adjusted is None:
        return draw_from(logits, rows, numbers)
    places = adjusted.lines.places
    own = draw_from(adjusted.logits, adjusted.lines.rows, adjusted.numbers)
    count_tokens_(state.penalties.counts, adjusted.lines.count_slots, own.tokens)
    if adjusted.chosen.all():
        return own
    others = rows.index_fill(0, places, state.scratch_row)
    sampled = draw_from(logits, others, numbers[~adjusted.chosen])
    sampled.tokens.index_copy_(0, places, own.tokens)
    sampled.bad.index_copy_(0, places, own.bad)
    return sampled


def _shape(state: SamplingState, logits: Tensor, rows: IntArray, masks: BatchMasks | None) -> Tensor:
    """The logits to sample from on a CPU: what requests do to them, then what grammars allow; nothing lifts that."""
    adjusted = adjust(state, logits, rows)
    if masks is not None:
        if adjusted is logits:
            adjusted = maskable(state, logits, rows, masks)
        forbid_tokens_(adjusted, masks.words, masks.places)
    return adjusted


def _draw(state: SamplingState, rows: IntArray, logits: Tensor, peak: Tensor) -> Tensor:
    """Tokens for rows that all draw at random. [rows] int64"""
    parameters, numbers = state.parameters, torch.from_numpy(rows.astype(np.int64))
    weights = softmax_weights(logits, peak, parameters.temperature[numbers])
    ranked = torch.from_numpy(np.flatnonzero(state.flags.ranked[rows]))
    if len(ranked):
        top_k, top_p = parameters.top_k[numbers[ranked]], parameters.top_p[numbers[ranked]]
        weights.index_copy_(0, ranked, keep_top(weights[ranked], top_k, top_p))
    weights = keep_min_p(weights, parameters.min_p[numbers])
    return draw(weights, uniform(parameters.seed[numbers], parameters.generated[numbers]))
