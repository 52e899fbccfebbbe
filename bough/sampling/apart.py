"""On devices, rows that sample from other logits than the model's get lines of their own.

Penalties need float32, a batch comes in 16 bits, and logprobs need the model's own numbers. So what a row changes is
written to a float32 line apart from the batch, by one kernel for all such rows: the others are neither widened nor
copied, and draw from what they would have drawn from alone. Rows that only forbid tokens are changed where they stand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bough.core.plan import BoolArray, IntArray
from bough.kernels.penalties.lines import PenaltyLines
from bough.sampling.adjust import bar_stop_ids, run_processors
from bough.sampling.masks import BatchMasks
from bough.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class Apart:
    """The rows of a batch that have lines of their own."""

    chosen: BoolArray  # [n] which they are
    numbers: IntArray  # [m] their row numbers
    lines: PenaltyLines  # the same on the device
    logits: Tensor  # [m, V] float32


def set_apart(state: SamplingState, logits: Tensor, rows: IntArray, masks: BatchMasks | None) -> Apart | None:
    """Lines for those of `rows` that need one, complete; in `logits` [n, V], what other rows must not say is forbidden.
    None: no row needs one."""
    if masks is None and not state.adjusted_rows:
        return None
    chosen = _need_lines(state, rows, masks)
    apart = _make_lines(state, logits, rows, chosen, masks) if chosen.any() else None
    stay = ~chosen
    guarded, theirs = state.flags.guarded[rows] & stay, None if masks is None else masks.among(stay, renumber=False)
    _forbid(state, logits, rows, guarded, theirs)
    return apart


def _need_lines(state: SamplingState, rows: IntArray, masks: BatchMasks | None) -> BoolArray:
    """Rows with numbers of their own; and of those that merely forbid tokens, the ones that want logprobs."""
    forbidding = state.flags.guarded[rows]
    if masks is not None:
        forbidding = forbidding | masks.masked
    return state.flags.exact(rows) | (forbidding & state.flags.logprobs[rows])


def _make_lines(
    state: SamplingState, logits: Tensor, rows: IntArray, chosen: BoolArray, masks: BatchMasks | None
) -> Apart:
    from bough.kernels.penalties.triton import penalise  # Triton is installed only where it has a device to drive

    places = np.flatnonzero(chosen)
    numbers = rows[places]
    lines = state.penalty_lines(places, numbers)
    own = penalise(logits, lines, state.penalties)
    run_processors(state, own, numbers)
    theirs = None if masks is None else masks.among(chosen, renumber=True)
    _forbid(state, own, numbers, state.flags.guarded[numbers], theirs)
    return Apart(chosen, numbers, lines, own)


def _forbid(state: SamplingState, logits: Tensor, rows: IntArray, guarded: BoolArray, masks: BatchMasks | None) -> None:
    """What nothing may lift: first the bar on stop tokens, then what grammars do not allow."""
    from bough.kernels.token_mask.triton import forbid_tokens_

    bar_stop_ids(state, logits, rows, guarded)
    if masks is not None:
        forbid_tokens_(logits, masks.words, masks.places)
