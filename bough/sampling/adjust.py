"""What a request may do to the model's logits before a token is drawn.

The order is SGLang's: logit bias, penalties, custom processors; last the bar on stop tokens, which nothing may lift.
Penalties need float32, and logprobs need the model's own numbers. `adjust` is for CPUs and changes logits in place
where it can. `adjust_on_device` writes each row that changes its numbers to a float32 line outside the batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.core.plan import BoolArray, IntArray
from bough.kernels.logits.reference import PenaltyLines, penalise
from bough.sampling.custom_logit_processor import Processor, run_processor
from bough.sampling.masks import BatchMasks
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
