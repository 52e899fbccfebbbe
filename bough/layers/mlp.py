"""The gated feed-forward block: two products of the input, one gating the other, and a third back to the old width."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bough.core.model_config import ModelConfig
from bough.layers.linear import ColumnLinear, Columns, RowLinear
from bough.layers.norm import RmsNorm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class GatedMLP:
    """down(activation(gate(x)) * up(x)), the inner width shared among ranks."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        held = placement.topology.slice_of(config.intermediate_size, "intermediate_size")
        parts = (Columns("gate_proj", held), Columns("up_proj", held))
        self._gate_up = ColumnLinear(config.hidden_size, parts, config.mlp_bias, placement)
        self._down = RowLinear("down_proj", held, config.hidden_size, config.mlp_bias, placement)
        self._activation = config.activation

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RmsNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block over the norm of x + residual; returns the result and that sum."""
        gated, stream = self._gate_up.gated_after(norm, x, residual, self._activation, self._down.gate)
        return self._down(gated), stream

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._gate_up.slots(prefix)
        yield from self._down.slots(prefix)
