"""One sampling step for a whole batch: logits in, one token per row out.

A greedy batch pays for an argmax. Other needs are met for the rows that have them, chosen from the host's flags. A row
whose logits are unusable is reported as bad, alone. On CUDA devices the same happens in two or three launches for all
rows; rows that adjust their logits are drawn by launches of their own. State lives in `SamplingState`.

What a request may do to the model's logits before has SGLang's order: logit bias, penalties, custom processors; last
the bar on stop tokens, which nothing may lift. Penalties need float32, and logprobs need the model's own numbers.
`adjust` is for CPUs and changes logits in place where it can. `adjust_on_device` writes each row that changes its
numbers to a float32 line outside the batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.core.plan import BoolArray, IntArray
from bough.kernels.logits.reference import PenaltyLines, forbid_tokens_, penalise
from bough.kernels.sampling.rows import uniform
from bough.sampling.custom_logit_processor import Processor, run_processor
from bough.sampling.masks import BatchMasks, maskable
from bough.sampling.slots import to_device
from bough.sampling.state import SamplingState


def adjust(state: SamplingState, logits: Tensor, rows: IntArray) -> Tensor:
    """The logits to sample from, on a CPU. [n, V]

    Adjusted rows are overwritten in `logits`, unless one of them also wants logprobs: those are of the model's own
    distribution, so the adjustment then works on a copy. So it does where logits have 16 bits, which would round the
    smaller penalties away: the whole batch is widened then, because a batch has one type.
    """
    adjusted = state.flags.adjusted(rows)
    if not adjusted.any():
        return logits
    exact = state.flags.exact(rows)
    if logits.dtype != torch.float32 and exact.any():
        logits = logits.float()
    elif (adjusted & state.flags.logprobs[rows]).any():
        logits = logits.clone()
    if exact.any():
        places = np.flatnonzero(exact)
        lines = state.penalty_lines(places, rows[places])
        logits.index_copy_(0, lines.places, penalise(logits, lines, state.penalties))
    _run_processors(state, logits, rows)
    _bar_stop_ids(state, logits, rows, state.flags.guarded[rows])
    return logits


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """The rows of a batch that sample from logits of their own."""

    chosen: BoolArray  # [n] which they are
    numbers: IntArray  # [m] their row numbers
    lines: PenaltyLines  # the same on the device
    logits: Tensor  # [m, V] float32


def adjust_on_device(
    state: SamplingState, logits: Tensor, rows: IntArray, masks: BatchMasks | None
) -> AdjustedRows | None:
    """Lines for those of `rows` that need one, complete; in `logits` [n, V], what other rows must not say is forbidden.
    None: no row needs one."""
    if masks is None and not state.flags.adjusted(rows).any():
        return None
    forbidding = state.flags.guarded[rows] if masks is None else state.flags.guarded[rows] | masks.masked
    # Rows with numbers of their own; and of those that merely forbid tokens, the ones that want logprobs.
    chosen = state.flags.exact(rows) | (forbidding & state.flags.logprobs[rows])
    adjusted = _make_lines(state, logits, rows, chosen, masks) if chosen.any() else None
    stay = ~chosen
    guarded, theirs = state.flags.guarded[rows] & stay, None if masks is None else masks.among(stay, renumber=False)
    _forbid(state, logits, rows, guarded, theirs)
    return adjusted


def _make_lines(
    state: SamplingState, logits: Tensor, rows: IntArray, chosen: BoolArray, masks: BatchMasks | None
) -> AdjustedRows:
    from bough.kernels.logits import triton  # Triton is installed only where it has a device to drive

    places = np.flatnonzero(chosen)
    numbers = rows[places]
    lines = state.penalty_lines(places, numbers)
    own = triton.penalise(logits, lines, state.penalties)
    _run_processors(state, own, numbers)
    theirs = None if masks is None else masks.among(chosen, renumber=True)
    _forbid(state, own, numbers, state.flags.guarded[numbers], theirs)
    return AdjustedRows(chosen, numbers, lines, own)


def _forbid(state: SamplingState, logits: Tensor, rows: IntArray, guarded: BoolArray, masks: BatchMasks | None) -> None:
    """What nothing may lift: first the bar on stop tokens, then what grammars do not allow."""
    from bough.kernels.logits.triton import forbid_tokens_

    _bar_stop_ids(state, logits, rows, guarded)
    if masks is not None:
        forbid_tokens_(logits, masks.words, masks.places)


def _run_processors(state: SamplingState, logits: Tensor, rows: IntArray) -> None:
    """Each processor once, with all rows that brought it."""
    if not state.processors:
        return
    together: dict[int, tuple[Processor, list[int]]] = {}
    for place in np.flatnonzero(state.flags.processed[rows]).tolist():
        processor, _ = state.processors[int(rows[place])]
        together.setdefault(id(processor), (processor, []))[1].append(place)
    for processor, places in together.values():
        at = to_device(np.array(places, dtype=np.int64), state.device)
        params = [state.processors[int(rows[place])][1] for place in places]
        logits.index_copy_(0, at, run_processor(processor, logits.index_select(0, at), params))


def _bar_stop_ids(state: SamplingState, logits: Tensor, rows: IntArray, guarded: BoolArray) -> None:
    """Touches only the stop ids' own logits."""
    places = np.flatnonzero(guarded)
    if not len(places):
        return
    at, numbers = to_device(np.stack((places, rows[places])), state.device)
    logits.index_put_((at[:, None], state.bars.ids[numbers]), logits.new_full((), -torch.inf))  # [guarded, width]


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
        return sample_rows_on_device(state, logits, to_device(rows.astype(np.int64), state.device), rows, masks=masks)
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


# CPUs without native kernels: from logits to weights, and from weights to a token. Weights are softmax numerators with
# the best token's at 1: each filter compares with a sum where the textbook divides by it. Filters apply in the order
# top-k, top-p, min-p, each over what the one before left; among equal weights the lower token id ranks first. A row
# that must fail yields meaningless weights here and harms no other row. Sorting and argmax are numpy's, ten times as
# fast on CPUs as torch's.


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
