"""RMS norm as a layer: the weight, and the settings that the kernel needs with it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bough.kernels.ops import Norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class RmsNorm:
    """Normalises the last dimension. Every rank holds the whole weight."""

    def __init__(self, size: int, eps: float, plus_one: bool, placement: Placement) -> None:
        self.norm = Norm(placement.empty(size), eps, plus_one)
        self._rms_norm = placement.ops.rms_norm

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum."""
        return self._rms_norm(x, self.norm.weight, self.norm.eps, residual, self.norm.plus_one)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}.weight", self.norm.weight)
