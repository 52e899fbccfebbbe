"""Norms as layers. Each gives the norm of x + residual together with that sum, which is the next residual."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.kernels.ops import Norm, WithSum
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class NormLayer(Protocol):
    """What layers ask of the norm before them."""

    rms: Norm | None = None  # of an RMS norm: its product may be one kernel with it

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        """The norm of x + residual, and that sum."""
        ...

    def slots(self, prefix: str) -> Iterator[WeightSlot]: ...


class RmsNorm(NormLayer):
    """Normalises the last dimension. Every rank holds the whole weight, unless `held` says which part of it."""

    def __init__(self, size: int, eps: float, plus_one: bool, placement: Placement, held: slice | None = None) -> None:
        self._index = () if held is None else (held,)
        self.rms: Norm = Norm(placement.empty(size), eps, plus_one)
        self._rms_norm = placement.ops.rms_norm

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        return self._rms_norm(x, self.rms.weight, self.rms.eps, residual, self.rms.plus_one)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self.rms.weight, self._index)


class NoNorm(NormLayer):
    """Stands where a block has no norm before a layer: x + residual itself."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        total = x if residual is None else x + residual
        return total, total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from ()


NO_NORM = NoNorm()


class Inputs(NamedTuple):
    """What a layer computes with: the norm of x + residual."""

    x: torch.Tensor
    residual: torch.Tensor | None = None
    norm: NormLayer = NO_NORM

    def taken(self, ctx: ForwardContext) -> WithSum:
        """The norm, and the sum."""
        return self.norm(self.x, self.residual, ctx)


class LayerNorm(NormLayer):
    """Centres and normalises the last dimension, in float32; with or without a weight and a bias."""

    def __init__(
        self, size: int, eps: float, bias: bool, placement: Placement, *, weight: bool = True, plus_one: bool = False
    ) -> None:
        self._weight = placement.empty(size) if weight else None
        self._bias = placement.empty(size) if bias else None
        self._eps, self._plus_one = eps, plus_one

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        total = x if residual is None else x + residual
        weight = self._weight + 1 if self._weight is not None and self._plus_one else self._weight
        return F.layer_norm(total, total.shape[-1:], weight, self._bias, self._eps), total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._weight is not None:
            yield WeightSlot(f"{prefix}weight", self._weight)
        if self._bias is not None:
            yield WeightSlot(f"{prefix}bias", self._bias)


def make_norm(config: ModelConfig, placement: Placement) -> RmsNorm | LayerNorm:
    """The kind of norm that the model has, over its hidden states."""
    if config.norm == "layer":
        settings = {"weight": config.norm_weight, "plus_one": config.norm_plus_one}
        return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias, placement, **settings)
    return RmsNorm(config.hidden_size, config.norm_eps, config.norm_plus_one, placement)
