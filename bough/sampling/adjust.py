"""What a request may do to the model's logits before a token is drawn: bias, penalties, code of its own, a bar on stop
tokens.

Each function changes logits in place, for the rows that asked and no others. The order is SGLang's: logit bias, then
penalties, then custom processors; last the bar on stop tokens, which nothing may lift.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bough.core.plan import IntArray
from bough.sampling.batch import Part, to_device
from bough.sampling.custom_logit_processor import Processor, run_processor
from bough.sampling.state import SamplingState

ADJUST_BLOCK = 64  # rows whose adjustment exists at once: 40 MB for each copy with a vocabulary of 150,000


def adjust(state: SamplingState, logits: Tensor, rows: IntArray) -> Tensor:
    """The logits to sample from. [n, V]

    Adjusted rows are overwritten in `logits`, unless one of them also wants logprobs: those are of the model's own
    distribution, so the adjustment then works on a copy. So it does where logits have 16 bits, which would round the
    smaller penalties away: the whole batch is widened then, because a batch has one type.
    """
    adjusted = state.flags.adjusted(rows)
    if not adjusted.any():
        return logits
    exact = state.flags.penalised(rows) | state.flags.biased[rows] | state.flags.processed[rows]
    if logits.dtype != torch.float32 and exact.any():
        logits = logits.float()
    elif (adjusted & state.flags.logprobs[rows]).any():
        logits = logits.clone()
    for flagged, apply in (
        (state.flags.biased, _add_bias),
        (state.flags.repetition, _penalise_repetition),
        (state.flags.additive, _penalise_frequency_and_presence),
    ):
        part = Part.where(flagged[rows], rows, state.device)
        for block in () if part is None else part.blocks(ADJUST_BLOCK):
            block.put(logits, apply(state, block, block.take(logits)))
    if state.flags.processed[rows].any():
        _run_processors(state, logits, rows)
    guarded = Part.where(state.flags.guarded[rows], rows, state.device)
    if guarded is not None:
        _bar_stop_ids(state, guarded, logits)
    return logits


def _add_bias(state: SamplingState, part: Part, logits: Tensor) -> Tensor:
    return logits.add_(state.bias.lines(part.numbers))


def _penalise_repetition(state: SamplingState, part: Part, logits: Tensor) -> Tensor:
    """Moves every token of prompt and output towards less likely, whichever sign its logit has."""
    seen = (state.output_counts.lines(part.numbers) > 0).logical_or_(state.prompt_tokens.lines(part.numbers))
    penalty = state.repetition_penalty[part.rows, None]
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def _penalise_frequency_and_presence(state: SamplingState, part: Part, logits: Tensor) -> Tensor:
    """OpenAI's penalties: for each time an output token stood, and once for having stood at all."""
    counts = state.output_counts.lines(part.numbers)
    logits.addcmul_(counts, state.frequency_penalty[part.rows, None], value=-1)
    return logits.addcmul_(counts.clamp_(max=1), state.presence_penalty[part.rows, None], value=-1)


def _run_processors(state: SamplingState, logits: Tensor, rows: IntArray) -> None:
    """Each processor once, with all rows that brought it."""
    together: dict[int, tuple[Processor, list[int]]] = {}
    for place in np.flatnonzero(state.flags.processed[rows]).tolist():
        processor, _ = state.processors[int(rows[place])]
        together.setdefault(id(processor), (processor, []))[1].append(place)
    for processor, places in together.values():
        at = to_device(np.array(places, dtype=np.int64), state.device)
        params = [state.processors[int(rows[place])][1] for place in places]
        logits.index_copy_(0, at, run_processor(processor, logits.index_select(0, at), params))


def _bar_stop_ids(state: SamplingState, part: Part, logits: Tensor) -> None:
    """Touches only the stop ids' own logits, so a guarded row costs next to nothing once its minimum is reached."""
    places = torch.arange(len(logits), device=logits.device) if part.places is None else part.places
    at = (places[:, None], state.stop_ids[part.rows])  # [part, width]
    early = state.generated[part.rows] < state.min_new_tokens[part.rows]
    logits[at] = logits[at].masked_fill_(early[:, None], -torch.inf)
