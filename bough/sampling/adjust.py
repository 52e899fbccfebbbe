"""What a request may do to the model's logits before a token is drawn: bias, penalties, code of its own, a bar on stop
tokens.

Each function changes logits in place, for the rows that asked and no others. The order is SGLang's: logit bias, then
penalties, then custom processors; last the bar on stop tokens, which nothing may lift. `adjust` is for CPUs; `apart`
has what devices do, with the same parts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bough.core.plan import BoolArray, IntArray
from bough.kernels.penalties.reference import penalise
from bough.sampling.batch import Part, to_device
from bough.sampling.custom_logit_processor import Processor, run_processor
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
    run_processors(state, logits, rows)
    bar_stop_ids(state, logits, rows, state.flags.guarded[rows])
    return logits


def run_processors(state: SamplingState, logits: Tensor, rows: IntArray) -> None:
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


def bar_stop_ids(state: SamplingState, logits: Tensor, rows: IntArray, guarded: BoolArray) -> None:
    """Touches only the stop ids' own logits."""
    part = Part.where(guarded, rows, state.device)
    if part is None:
        return
    places = torch.arange(len(logits), device=logits.device) if part.places is None else part.places
    at = (places[:, None], state.bars.ids[part.rows])  # [part, width]
    logits.index_put_(at, logits.new_full((), -torch.inf))
