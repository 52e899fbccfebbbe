"""Bias and penalties in plain torch, line by line; CPUs use it as it is: a line fits their caches, a batch does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class PenaltyLines:
    """Some rows of a batch, each once. [m] int64 each"""

    places: Tensor  # in the batch
    rows: Tensor  # their numbers
    count_slots: Tensor  # NO_SLOT: no penalties
    prompt_slots: Tensor  # NO_SLOT: no repetition penalty; else there is a count slot too
    bias_slots: Tensor  # NO_SLOT: no bias


@dataclass(frozen=True, slots=True)
class PenaltyStore:
    """What all rows keep."""

    repetition: Tensor  # [rows] float32
    frequency: Tensor  # [rows] float32
    presence: Tensor  # [rows] float32
    counts: Tensor  # [slots, V] float32: how often a token stands in the output
    prompts: Tensor  # [slots, V] bool: whether it stands in the prompt
    bias: Tensor  # [slots, V] float32


def penalise(logits: Tensor, lines: PenaltyLines, store: PenaltyStore) -> Tensor:
    """The lines of `logits` [n, V] as their rows want them, in float32: 16 bits round small penalties away. [m, V]

    In this order: the bias is added; a repetition penalty moves every token of prompt and output towards less likely,
    whichever sign its logit has; the others, OpenAI's, are taken off for each time that an output token stood, and once
    for having stood at all. A line without slots is only widened.
    """
    result = torch.empty((len(lines.places), logits.shape[1]), dtype=torch.float32, device=logits.device)
    fields = (lines.places, lines.rows, lines.count_slots, lines.prompt_slots, lines.bias_slots)
    for line, (place, row, counted, prompted, biased) in zip(result, torch.stack(fields, dim=1).tolist(), strict=True):
        line.copy_(logits[place])
        if biased >= 0:
            line.add_(store.bias[biased])
        if prompted >= 0:
            seen = (store.counts[counted] > 0).logical_or_(store.prompts[prompted])
            penalty = store.repetition[row]
            line.copy_(torch.where(seen, torch.where(line > 0, line / penalty, line * penalty), line))
        if counted >= 0:
            counts = store.counts[counted]
            line.addcmul_(counts, store.frequency[row], value=-1)
            line.addcmul_(counts.clamp(max=1), store.presence[row], value=-1)
    return result


def count_tokens_(counts: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Adds one to `counts` [slots, V] for token `tokens[i]` of slot `slots[i]`, [m] int64 each; lines without a slot
    count nothing, and no slot stands twice."""
    held = slots >= 0
    flat = slots[held] * counts.shape[1] + tokens[held]
    counts.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))
