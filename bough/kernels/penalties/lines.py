"""What the penalty kernels are told: which lines of a batch to rewrite, and where the rows keep what decides it.

The tensors belong to the caller. Penalties lie in columns by row number; what is as wide as the vocabulary lies in
slots, which only the rows that need one hold.
"""

from __future__ import annotations

from dataclasses import dataclass

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
