"""LoRA adapters over linear layers: each adds a product of two thin matrices for the tokens that chose it.

`AdapterSlots` wraps a model's way to keep weights. An adapter is put into a slot; the forward context says which tokens
compute with which slot. Without such tokens a layer does what it would do without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from bough.attention.context import ForwardContext
from bough.kernels.ops import Activation, Norm, Ops
from bough.layers.placement import Placement, WeightMaker
from bough.layers.schemes.base import Gate, LinearWeight, Part, Rows, bands
from bough.layers.weights import WeightSlot

# By the names that the matrices have in the model, without `.weight`: `down` [rank, inputs] and `up` [outputs, rank],
# which is scaled already. What is added to the matrix is their product.
Adapter = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class AdapterSlots:
    """The linear layers of one model that adapters may change."""

    def __init__(self) -> None:
        self._weights: list[AdaptedWeight] = []

    def over(self, make: WeightMaker) -> WeightMaker:
        """The scheme, with adapters over its weights."""

        def make_adapted(in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
            weight = make(in_features, parts, bias, placement)
            self._weights.append(AdaptedWeight(weight, in_features, parts, placement.ops))
            return self._weights[-1]

        return make_adapted

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each matrix."""
        held = ((name, rows, weight.inputs) for weight in self._weights for name, rows in weight.matrices())
        return {name: (rows.stop - rows.start, inputs) for name, rows, inputs in held}

    def place(self, slot: int, adapter: Adapter, dtype: torch.dtype, device: torch.device) -> None:
        """Puts a copy of the adapter into the slot, unless it is on the device already."""
        placed = {name: (down.to(device, dtype), up.to(device, dtype)) for name, (down, up) in adapter.items()}
        for weight in self._weights:
            weight.place(slot, placed)


class AdaptedWeight:
    """The weight of a layer, and what each slot adds to it."""

    def __init__(self, weight: LinearWeight, in_features: int, parts: Sequence[Part], ops: Ops) -> None:
        self._weight, self.inputs, self._parts, self._ops = weight, in_features, tuple(parts), ops
        self._prefix = ""
        self._slots: dict[int, list[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]] = {}

    def matrices(self) -> list[tuple[str, slice]]:
        """Their names, and which outputs are theirs."""
        return [(self._prefix + part.name, held) for part, held in bands(self._parts)]

    def place(self, slot: int, adapter: Adapter) -> None:
        self._slots[slot] = [(held, adapter[name]) for name, held in self.matrices() if name in adapter]

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        product = self._weight.linear(x, ctx)
        if ctx.adapters is None:
            return product
        assert isinstance(x, torch.Tensor), "adapters multiply plain rows"
        for slot, places in ctx.adapters.among(len(x), ctx.logits_indices):
            rows = x.index_select(0, places)
            for held, (down, up) in self._slots[slot]:
                product[:, held].index_add_(0, places, (rows @ down.T) @ up.T)
        return product

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if ctx.adapters is None:
            return self._weight.after_norm(x, residual, norm, ctx)
        normed, total = self._ops.rms_norm(x, norm.weight, norm.eps, residual, norm.plus_one)
        return self.linear(normed, ctx), total

    def gated_after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        activation: Activation,
        gate: Gate,
        ctx: ForwardContext,
    ) -> tuple[Rows, torch.Tensor]:
        if ctx.adapters is None:
            return self._weight.gated_after_norm(x, residual, norm, activation, gate, ctx)
        gate_up, total = self.after_norm(x, residual, norm, ctx)
        return gate(gate_up, activation), total

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        return self._weight.gate(gate_up, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        self._prefix = prefix
        yield from self._weight.slots(prefix)
