"""Weights packed for the native CPU kernels: quantised as their file has them, quantised at load, or as floats.

Each part of a layer keeps its own form, since a file may have given them different types; one product takes them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import MoEConfig
from bough.kernels.lora.reference import PackedStack
from bough.kernels.ops import Activation, PackedExpertWeights, PackedOps, Router
from bough.kernels.quant_linear.packed import FillingWeight
from bough.layers.schemes.base import ExpertWeights, LinearWeight, Part, Rows, bias_slots, expert_bias_slots
from bough.layers.weights import WeightSlot

if TYPE_CHECKING:
    from bough.layers.placement import Placement


class PackedLinear(LinearWeight):
    """The matrix of one layer, a packed weight for each of its parts."""

    def __init__(
        self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement, quantization: str
    ) -> None:
        self._parts = tuple(parts)
        self._weights = [FillingWeight(part.outputs, in_features, quantization) for part in parts]
        self._bias = placement.empty(sum(part.outputs for part in parts)) if bias else None
        self._ops: PackedOps = _packed_ops(placement)

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "the product itself quantises its rows"
        return self._ops.packed_linear(x, [weight.weight for weight in self._weights], self._bias)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part, weight in zip(self._parts, self._weights, strict=True):
            yield _slot(f"{prefix}{part.name}.weight", weight, part.index)
        yield from bias_slots(prefix, self._parts, self._bias)


class PackedExperts(ExpertWeights):
    """The experts of a layer: a packed weight for each of their matrices."""

    has_shared = False
    adapters: Sequence[PackedStack] = ()

    def __init__(self, hidden_size: int, moe: MoEConfig, placement: Placement, quantization: str) -> None:
        self._ops: PackedOps = _packed_ops(placement)
        self._moe, inner = moe, moe.intermediate_size
        shapes = {"gate_proj": (inner, hidden_size), "up_proj": (inner, hidden_size), "down_proj": (hidden_size, inner)}
        self._weights = {
            f"{expert}.{part}": FillingWeight(*shape, quantization)
            for expert in range(moe.experts)
            for part, shape in shapes.items()
        }
        self._gate_up_bias = placement.empty(moe.experts, 2 * inner) if moe.biases else None
        self._down_bias = placement.empty(moe.experts, hidden_size) if moe.biases else None

    def __call__(self, x: torch.Tensor, router: Router, activation: Activation, ctx: ForwardContext) -> torch.Tensor:
        weights = [weight.weight for weight in self._weights.values()]
        experts = PackedExpertWeights(weights, self._gate_up_bias, self._down_bias, self.adapters)
        return self._ops.packed_experts(x, router, self._moe, experts, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for name, weight in self._weights.items():
            yield _slot(f"{prefix}{name}.weight", weight)
        yield from expert_bias_slots(prefix, range(self._moe.experts), self._gate_up_bias, self._down_bias)


class PackedTable:
    """A vocabulary's vectors, packed."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement, quantization: str) -> None:
        self._weight = FillingWeight(vocab_size, hidden_size, quantization)
        self._ops = _packed_ops(placement)

    def embed(self, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self._ops.packed_embedding(token_ids, self._weight.weight, scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.packed_linear(hidden, [self._weight.weight], None)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield _slot(f"{prefix}weight", self._weight)


def _packed_ops(placement: Placement) -> PackedOps:
    assert isinstance(placement.ops, PackedOps), "packed weights need operations for them"
    return placement.ops


def _slot(name: str, weight: FillingWeight, index: tuple[slice, ...] = ()) -> WeightSlot:
    shape = torch.empty(weight.outputs, weight.inputs, device="meta")  # no memory: the rows are kept in another form
    return WeightSlot(name, shape, index, packing=weight)
