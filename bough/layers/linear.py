"""Matrix products, cut across ranks.

A `ColumnLinear` gives each rank some of the outputs; a `RowLinear` takes those as its inputs and sums the partial
results of the ranks. One of each, in this order, is one exchange between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bough.kernels.ops import Activation
from bough.layers.norm import RmsNorm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


@dataclass(frozen=True, slots=True)
class Columns:
    """The part of one checkpoint matrix that this rank computes: the outputs `held`."""

    name: str
    held: slice

    @property
    def size(self) -> int:
        return int(self.held.stop) - int(self.held.start)


class ColumnLinear:
    """Several checkpoint matrices with the same input, stacked to a single product; outputs stand side by side."""

    def __init__(self, in_features: int, parts: Sequence[Columns], bias: bool, placement: Placement) -> None:
        self._parts = tuple(parts)
        out_features = sum(part.size for part in parts)
        self.weight = placement.empty(out_features, in_features)
        self.bias = placement.empty(out_features) if bias else None
        self._ops = placement.ops

    def after(self, norm: RmsNorm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of the norm of x + residual, and that sum."""
        return self._ops.norm_linear(x, residual, norm.norm, self.weight, self.bias)

    def gated_after(
        self, norm: RmsNorm, x: torch.Tensor, residual: torch.Tensor | None, activation: Activation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for two matrices of equal size, of which the first gates the second."""
        return self._ops.norm_gate_up(x, residual, norm.norm, self.weight, self.bias, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        start = 0
        for part in self._parts:
            rows = slice(start, start + part.size)
            yield WeightSlot(f"{prefix}{part.name}.weight", self.weight[rows], (part.held,))
            if self.bias is not None:
                yield WeightSlot(f"{prefix}{part.name}.bias", self.bias[rows], (part.held,))
            start = rows.stop


class RowLinear:
    """One checkpoint matrix of which this rank multiplies the inputs `held`; the ranks' results are summed."""

    def __init__(self, name: str, held: slice, out_features: int, bias: bool, placement: Placement) -> None:
        self._name = name
        self._held = held
        self._all_reduce = placement.all_reduce
        self._linear = placement.ops.linear
        self.weight = placement.empty(out_features, int(held.stop) - int(held.start))
        # Only the first rank adds the bias: the sum over ranks then has it once.
        self.bias = placement.empty(out_features) if bias and placement.topology.tp_rank == 0 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(self._linear(x, self.weight, self.bias))

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}{self._name}.weight", self.weight, (slice(None), self._held))
        if self.bias is not None:
            yield WeightSlot(f"{prefix}{self._name}.bias", self.bias)
