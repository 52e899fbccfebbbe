"""How layers tell a loader what they need, without either knowing the other.

A layer yields one `WeightSlot` for each checkpoint tensor; the loader reads `tensor[index]` and copies it to `target`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One checkpoint tensor and the place that it, or this rank's part of it, is copied to."""

    name: str  # as in the checkpoint, with Hugging Face's names
    target: torch.Tensor  # a view of the layer's memory, already in the right shape, type and place
    index: tuple[slice, ...] = ()  # which part of the checkpoint tensor belongs to this rank; empty: all of it
