"""The seam between linear layers and the ways to keep a weight.

A `LinearWeight` owns the tensors of one layer. Layers decide which part of which checkpoint matrix is theirs; the
weight decides in what form the products are computed. Each product gets the forward context, so that a weight may
depend on the request. While the checkpoint is read, a weight gets its parts band by band, each from its first row to
its last.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bough.attention.context import ForwardContext
from bough.core.errors import ModelError
from bough.core.model_config import MoEConfig
from bough.kernels.ops import Activation, NormedSum, Ops, Router, WithNorm, WithSum
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.layers.weights import WeightSlot

Rows = torch.Tensor | QuantizedRows  # activations, as they are or in the form that some weight multiplies
Gate = Callable[[torch.Tensor, Activation], Rows]
GatedRows = tuple[Rows, torch.Tensor]  # those that a gate gives, and the sum x + residual


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs that one checkpoint matrix, or this rank's part of it, gives a layer."""

    name: str
    outputs: int
    index: tuple[slice, ...]  # the part: rows, and columns unless it has all of them


class LinearWeight(Protocol):
    """The matrix of one layer, and its bias if it has one."""

    _ops: Ops

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        """The product of the rows."""
        ...

    def after_norm(self, inputs: NormedSum, ctx: ForwardContext) -> WithSum:
        """The product of the norm, and the sum."""
        normed, total = inputs.taken(self._ops)
        return self.linear(normed, ctx), total

    def gated_after_norm(self, inputs: NormedSum, activation: Activation, gate: Gate, ctx: ForwardContext) -> GatedRows:
        """The same for a weight of which the first half of the outputs gates the second. `gate` is that of the weight
        that multiplies the result; one that has a fused way to plain rows need not use it."""
        gate_up, stream = self.after_norm(inputs, ctx)
        return gate(gate_up, activation), stream

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        """`activation(gate) * up`, in the form that this weight multiplies best."""
        return self._ops.gated_mul(gate_up, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """What fills the weight, for parts whose names begin with `prefix`."""
        ...


class ExpertWeights(Protocol):
    """The matrices of a layer's experts, of each this rank's share."""

    _ops: Ops

    @property
    def has_shared(self) -> bool:
        """Whether those that every token passes are among them."""
        ...

    def __call__(self, x: torch.Tensor, router: Router, activation: Activation, ctx: ForwardContext) -> torch.Tensor:
        """The weighted sum of the experts that the router chooses for each row."""
        ...

    def after_norm(self, inputs: NormedSum, router: Router, activation: Activation, ctx: ForwardContext) -> WithNorm:
        """The same for a norm."""
        normed, total = inputs.taken(self._ops)
        return self(normed, router, activation, ctx), normed, total

    def by_logits(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        scale: torch.Tensor | None,
        activation: Activation,
        ctx: ForwardContext,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same for a router's logits [rows, experts], and its `bias` when choosing; each expert's weight is
        multiplied with its `scale`."""
        raise ModelError(f"{type(self).__name__} cannot take the logits of a router that is not theirs.")

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """What fills the experts, by their numbers under `prefix`."""
        ...


class TableWeight(Protocol):
    """One vector for each token: looked up at a model's beginning, multiplied with at its end."""

    def embed(self, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """The tokens' vectors times `scale`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The product with all vectors."""
        ...

    def slots(self, prefix: str) -> Iterator[WeightSlot]: ...


class TellOnce:
    """Warnings of a model's weights: many layers have the same to say."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._told = log, set[str]()

    def __call__(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._log.warning(line)


def bands(parts: Sequence[Part]) -> Iterator[tuple[Part, slice]]:
    """Each part with its rows in the layer's matrix."""
    start = 0
    for part in parts:
        yield part, slice(start, start + part.outputs)
        start += part.outputs


def bias_slots(prefix: str, parts: Sequence[Part], bias: torch.Tensor | None) -> Iterator[WeightSlot]:
    """Slots of a bias that is kept as it is."""
    if bias is not None:
        for part, rows in bands(parts):
            yield WeightSlot(f"{prefix}{part.name}.bias", bias[rows], part.index[:1])


def expert_bias(
    hidden_size: int, inner: int, moe: MoEConfig, count: int, rank: int, empty: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for those of gate and up and of down of `count` experts, if there are any. Only the first of the ranks
    that share an expert adds down's: the sum over ranks then has it once."""
    if not moe.biases:
        return None, None
    return empty(count, 2 * inner), empty(count, hidden_size) if rank == 0 else None


def expert_bias_slots(
    prefix: str,
    experts: Sequence[int],
    gate_up: torch.Tensor | None,
    down: torch.Tensor | None,
    held: slice = slice(None),
) -> Iterator[WeightSlot]:
    """Slots of the biases [experts, outputs] of those experts, of which this rank has the inner outputs `held`."""
    for expert, bias in zip(experts, () if gate_up is None else gate_up, strict=False):
        for part, own in zip(("gate_proj", "up_proj"), bias.chunk(2), strict=True):
            yield WeightSlot(f"{prefix}{expert}.{part}.bias", own, (held,))
    for expert, bias in zip(experts, () if down is None else down, strict=False):
        yield WeightSlot(f"{prefix}{expert}.down_proj.bias", bias)
