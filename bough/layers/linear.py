"""Matrix products, cut across ranks.

A `ColumnLinear` gives each rank some of the outputs; a `RowLinear` takes those as its inputs and sums the partial
results of the ranks. One of each, in this order, is one exchange between ranks. How the weight is kept and multiplied
is the business of a scheme (`bough.layers.schemes`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bough.attention.context import ForwardContext
from bough.kernels.ops import Activation, NormedSum, WithSum
from bough.layers.norm import Inputs
from bough.layers.placement import Placement
from bough.layers.schemes.base import Gate, GatedRows, LinearWeight, Part, Rows
from bough.layers.weights import WeightSlot


@dataclass(frozen=True, slots=True)
class Columns:
    """The part of one checkpoint matrix that this rank computes: the outputs `held`."""

    name: str
    held: slice

    @property
    def size(self) -> int:
        return int(self.held.stop) - int(self.held.start)


def features(heads: slice, head_dim: int) -> slice:
    """The features that these heads occupy."""
    return slice(heads.start * head_dim, heads.stop * head_dim)


class Linear:
    """A product with a weight that is kept by some scheme."""

    _weight: LinearWeight

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._weight.slots(prefix)


class Products:
    """A layer that is filled by its products, whose matrices stand under its own prefix."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part in vars(self).values():
            if isinstance(part, Linear):
                yield from part.slots(prefix)


class ColumnLinear(Linear):
    """Several checkpoint matrices with the same input, stacked to a single product; outputs stand side by side."""

    def __init__(self, in_features: int, columns: Sequence[Columns], bias: bool, placement: Placement) -> None:
        parts = [Part(part.name, part.size, (part.held,)) for part in columns]
        self._weight = placement.make_weight(in_features, parts, bias, placement)

    def __call__(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self._weight.linear(x, ctx)

    def after(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        """The product of the norm of x + residual, and that sum."""
        x, residual, norm = inputs
        if norm.rms is not None:
            return self._weight.after_norm(NormedSum(x, residual, norm.rms), ctx)
        normed, total = inputs.taken(ctx)
        return self._weight.linear(normed, ctx), total

    def gated_after(self, inputs: Inputs, activation: Activation, gate: Gate, ctx: ForwardContext) -> GatedRows:
        """The same for two matrices of equal size, of which the first gates the second; `gate` is that of the layer
        that takes the result."""
        x, residual, norm = inputs
        if norm.rms is not None:
            return self._weight.gated_after_norm(NormedSum(x, residual, norm.rms), activation, gate, ctx)
        gate_up, total = self.after(inputs, ctx)
        return gate(gate_up, activation), total


class RowLinear(Linear):
    """One checkpoint matrix of which this rank multiplies the inputs `held`; the ranks' results are summed."""

    def __init__(self, name: str, held: slice, out_features: int, bias: bool, placement: Placement) -> None:
        self._all_reduce = placement.ranks.all_reduce
        # Only the first rank adds the bias: the sum over ranks then has it once.
        biased = bias and placement.topology.tp_rank == 0
        part = Part(name, out_features, (slice(None), held))
        self._weight = placement.make_weight(int(held.stop) - int(held.start), [part], biased, placement)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        """What gives this layer its rows (`LinearWeight.gate`)."""
        return self._weight.gate(gate_up, activation)

    def __call__(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        return self._all_reduce(self._weight.linear(x, ctx))
