"""Norms as layers: their weights, and how they join the product behind them.

Each gives the norm of x + residual together with that sum, which is the next residual. `into` and `into_gated` hand the
normalised rows to a weight; an RMS norm leaves that to the weight, which may have one kernel for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.kernels.ops import Activation, Norm
from bough.layers.placement import Placement
from bough.layers.schemes.base import Gate, LinearWeight, Rows
from bough.layers.weights import WeightSlot


class NormLayer(Protocol):
    """What layers ask of the norm before them."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum."""
        ...

    def into(
        self, weight: LinearWeight, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight's product of the norm, and the sum."""
        ...

    def into_gated(
        self,
        weight: LinearWeight,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        activation: Activation,
        gate: Gate,
        ctx: ForwardContext,
    ) -> tuple[Rows, torch.Tensor]:
        """The same for a weight of which the first half of the outputs gates the second."""
        ...

    def slots(self, prefix: str) -> Iterator[WeightSlot]: ...


class RmsNorm(NormLayer):
    """Normalises the last dimension. Every rank holds the whole weight."""

    def __init__(self, size: int, eps: float, plus_one: bool, placement: Placement) -> None:
        self.norm = Norm(placement.empty(size), eps, plus_one)
        self._rms_norm = placement.ops.rms_norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rms_norm(x, self.norm.weight, self.norm.eps, residual, self.norm.plus_one)

    def into(
        self, weight: LinearWeight, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return weight.after_norm(x, residual, self.norm, ctx)

    def into_gated(
        self,
        weight: LinearWeight,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        activation: Activation,
        gate: Gate,
        ctx: ForwardContext,
    ) -> tuple[Rows, torch.Tensor]:
        return weight.gated_after_norm(x, residual, self.norm, activation, gate, ctx)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self.norm.weight)


class NoNorm(NormLayer):
    """Stands where a block has no norm before a layer: x + residual itself."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return total, total

    def into(
        self, weight: LinearWeight, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self(x, residual, ctx)
        return weight.linear(normed, ctx), total

    def into_gated(
        self,
        weight: LinearWeight,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        activation: Activation,
        gate: Gate,
        ctx: ForwardContext,
    ) -> tuple[Rows, torch.Tensor]:
        gate_up, total = self.into(weight, x, residual, ctx)
        return gate(gate_up, activation), total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from ()


NO_NORM = NoNorm()


class LayerNorm(NoNorm):
    """Centres and normalises the last dimension, in float32; with or without a bias."""

    def __init__(self, size: int, eps: float, bias: bool, placement: Placement) -> None:
        self._weight = placement.empty(size)
        self._bias = placement.empty(size) if bias else None
        self._eps = eps

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return F.layer_norm(total, self._weight.shape, self._weight, self._bias, self._eps), total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self._weight)
        if self._bias is not None:
            yield WeightSlot(f"{prefix}bias", self._bias)


def make_norm(config: ModelConfig, placement: Placement, size: int | None = None) -> RmsNorm | LayerNorm:
    """The kind of norm that the model has, over its hidden states unless `size` says else."""
    width = config.hidden_size if size is None else size
    if config.norm == "layer":
        return LayerNorm(width, config.norm_eps, config.norm_bias, placement)
    return RmsNorm(width, config.norm_eps, config.norm_plus_one, placement)
