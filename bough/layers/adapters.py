"""LoRA adapters over linear layers: each adds a product of two thin matrices for the tokens that chose it.

`AdapterSlots` wraps a model's way to keep weights. An adapter is put into a slot; the forward context says which tokens
compute with which slot. Without such tokens a layer does what it would do without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from bough.attention.context import ForwardContext
from bough.kernels.lora.reference import LEAST_RANK, AdapterStack, tiles_of
from bough.kernels.ops import Activation
from bough.layers.placement import Placement, WeightMaker
from bough.layers.schemes.base import Gate, LinearWeight, NormedSum, Part, Rows, bands
from bough.layers.weights import WeightSlot

# By the names that the matrices have in the model, without `.weight`: `down` [rank, inputs] and `up` [outputs, rank],
# which is scaled already. What is added to the matrix is their product.
Adapter = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class AdapterSlots:
    """The linear layers of one model that adapters may change."""

    def __init__(self, slots: int) -> None:
        self.count, self.rank = slots, 0  # there is memory for this rank
        self._weights: list[AdaptedWeight] = []
        self._ranks: torch.Tensor | None = None  # [slots, matrices of all layers] int32

    def over(self, make: WeightMaker) -> WeightMaker:
        """The scheme, with adapters over its weights."""

        def make_adapted(in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
            weight = make(in_features, parts, bias, placement)
            self._weights.append(AdaptedWeight(weight, in_features, parts, placement))
            return self._weights[-1]

        return make_adapted

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each matrix."""
        held = ((name, band, weight.inputs) for weight in self._weights for name, band in weight.matrices())
        return {name: (band.stop - band.start, inputs) for name, band, inputs in held}

    def share(self, adapter: Adapter) -> Adapter:
        """This rank's part of an adapter for the whole model, cut as its matrices are: of `up` the outputs, of `down`
        the inputs that are here."""
        held = {name: index for weight in self._weights for name, index in weight.indices()}
        return {name: (down[:, held[name][1]], up[held[name][0]]) for name, (down, up) in adapter.items()}

    def reserve(self, rank: int) -> None:
        """Takes memory in all slots for adapters of this rank, in the place of what there is."""
        padded = max(LEAST_RANK, 1 << (rank - 1).bit_length())
        counts, device = [weight.reserve(self.count, padded) for weight in self._weights], self._weights[0].device
        if self._ranks is None:
            self._ranks = torch.zeros(self.count, sum(counts), dtype=torch.int32, device=device)
            for weight, ranks in zip(self._weights, torch.split(self._ranks, counts, dim=1), strict=True):
                weight.ranks = ranks
        self.rank = padded

    def place(self, slot: int, adapter: Adapter) -> None:
        """Copies an adapter into the slot."""
        assert self._ranks is not None
        ranks = [rank for weight in self._weights for rank in weight.place(slot - 1, adapter)]
        self._ranks[slot - 1].copy_(torch.tensor(ranks, dtype=torch.int32), non_blocking=True)


class AdaptedWeight:
    """The weight of a layer, and what each slot adds to it."""

    def __init__(self, weight: LinearWeight, in_features: int, parts: Sequence[Part], placement: Placement) -> None:
        self._weight, self.inputs, self._parts, self._ops = weight, in_features, tuple(parts), placement.ops
        self._prefix, self._empty, self.device = "", placement.empty, placement.device
        self._bands = tuple(band for _, band in bands(parts))
        self._tiles = torch.from_numpy(tiles_of(self._bands)).to(self.device)
        self._down, self._up, self.ranks = (torch.empty(0, device=self.device) for _ in range(3))

    def matrices(self) -> list[tuple[str, slice]]:
        """Their names, and which outputs are theirs."""
        return [(self._prefix + part.name, band) for part, band in bands(self._parts)]

    def indices(self) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """Their names, and which rows and columns of the whole matrices are here."""
        return ((self._prefix + part.name, (*part.index, slice(None))) for part in self._parts)

    def reserve(self, slots: int, rank: int) -> int:
        """Takes memory for matrices of this rank, and moves there what the slots hold; how many matrices there are."""
        down = self._empty(slots, len(self._parts), rank, self.inputs)
        up = self._empty(slots, self._bands[-1].stop, rank)
        if len(self._down):
            down[:, :, : self._down.shape[2]], up[:, :, : self._up.shape[2]] = self._down, self._up
        self._down, self._up = down, up
        return len(self._parts)

    def place(self, slot: int, adapter: Adapter) -> Iterator[int]:
        """Copies what the adapter has for these matrices, and yields their ranks."""
        for number, (name, band) in enumerate(self.matrices()):
            down, up = adapter.get(name, (self._down[slot, number, :0], self._up[slot, band, :0]))
            self._down[slot, number, : len(down)].copy_(down, non_blocking=True)
            self._up[slot, band, : len(down)].copy_(up, non_blocking=True)
            yield len(down)

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        product = self._weight.linear(x, ctx)
        if ctx.adapters is not None:
            x = x if isinstance(x, torch.Tensor) else x.dequantize().to(product.dtype)
            stack = AdapterStack(self._down, self._up, self.ranks, self._bands, self._tiles)
            self._ops.lora_(product, x, stack, ctx.adapters.among(len(x), ctx.logits_indices))
        return product

    def after_norm(self, inputs: NormedSum, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        if ctx.adapters is None:
            return self._weight.after_norm(inputs, ctx)
        normed, total = inputs.taken(self._ops)
        return self.linear(normed, ctx), total

    def gated_after_norm(
        self, inputs: NormedSum, activation: Activation, gate: Gate, ctx: ForwardContext
    ) -> tuple[Rows, torch.Tensor]:
        if ctx.adapters is None:
            return self._weight.gated_after_norm(inputs, activation, gate, ctx)
        gate_up, total = self.after_norm(inputs, ctx)
        # Not as the next weight would have it: its adapters are to multiply what was not rounded.
        return (self._ops.silu_mul if activation == "silu" else self._ops.gelu_tanh_mul)(gate_up), total

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        return self._weight.gate(gate_up, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        self._prefix = prefix
        yield from self._weight.slots(prefix)
