"""Weights as 8-bit floats with a scale for each output, or as a checkpoint has them, for every 128 inputs of it;
activations quantised as they come, with a scale for each token, or for every 128 of its values.

Both sides of a product then have 8 bits, which GPUs multiply twice as fast as 16 and read in half the time. Quantising
the activations is part of the kernel before the product: the norm, or the gate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import MoEConfig
from bough.kernels.ops import Activation, NormedSum, WithSum
from bough.kernels.quantize_rows.reference import QuantizedRows, empty_rows
from bough.kernels.registry import Fp8Ops, fp8_ops_for
from bough.kernels.scaled_linear.reference import FEW_ROWS, FEWEST_ROWS, fits
from bough.layers.schemes.base import ExpertWeights, LinearWeight, Part, Rows, TellOnce, bands, bias_slots
from bough.layers.schemes.plain import PlainWeight, QuantizedExperts
from bough.layers.weights import Form, WeightSlot, quantized_slot

if TYPE_CHECKING:
    from bough.layers.placement import Placement

log = logging.getLogger(__name__)


class Fp8Scheme:
    """Makes 8-bit weights of all layers that the product takes, and remembers which others it has spoken of."""

    def __init__(self) -> None:
        self._tell = TellOnce(log)

    def __call__(self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
        outputs = sum(part.outputs for part in parts)
        if fits(in_features, outputs):
            return Fp8Weight(in_features, parts, bias, placement)
        names, shape = ", ".join(part.name for part in parts), f"{outputs} x {in_features}"
        self._tell(f"{names}: {shape} are no multiples of 16; these weights stay {placement.dtype}")
        return PlainWeight(in_features, parts, bias, placement)


class Fp8Weight(LinearWeight):
    """A matrix that is quantised while it is loaded, or, with a `form`, that the checkpoint has so; its bias stays as
    it is. A few rows are not quantised."""

    def __init__(
        self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement, form: Form | None = None
    ) -> None:
        self._parts, self._form = tuple(parts), form
        outputs = sum(part.outputs for part in parts)
        self._weight = empty_rows(outputs, in_features, group=form.group if form else 0, device=placement.device)
        self._group = self._weight.group
        self._bias = placement.empty(outputs) if bias else None
        self._dtype = placement.dtype
        self._fp8, self._ops = fp8_ops_for(placement.device), placement.ops

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        if isinstance(x, QuantizedRows):
            return self._product(x)
        if self._takes_plain(x):
            return self._fp8.weight_linear(x, self._weight, self._bias)
        return self._product(self._fp8.quantize_rows(x, self._group))

    def after_norm(self, inputs: NormedSum, ctx: ForwardContext) -> WithSum:
        x, residual, norm = inputs
        if self._takes_plain(x):
            return super().after_norm(inputs, ctx)
        rows, stream = self._fp8.norm_quantize_rows(x, norm.weight, norm.eps, residual, norm.plus_one, self._group)
        return self._product(rows), stream

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        if self._takes_plain(gate_up):
            return super().gate(gate_up, activation)
        return self._fp8.gated_quantize_rows(gate_up, activation, self._group)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part, rows in bands(self._parts):
            own = QuantizedRows(*(held[rows] for held in self._weight))
            yield _slot(f"{prefix}{part.name}.weight", own, part.index, self._form, self._fp8)
        yield from bias_slots(prefix, self._parts, self._bias)

    def _takes_plain(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= (FEW_ROWS if self._group else FEWEST_ROWS)

    def _product(self, rows: QuantizedRows) -> torch.Tensor:
        return self._fp8.scaled_linear(rows, self._weight, self._bias, self._dtype)


def fp8_experts(
    hidden_size: int, moe: MoEConfig, placement: Placement, forms: tuple[Form, Form] | None = None
) -> ExpertWeights:
    """Experts that are quantised while they are loaded, or, with the `forms` of gate and up and of down, that the
    checkpoint has so."""
    ops = fp8_ops_for(placement.device)

    def empty(shape: tuple[int, ...], form: Form | None) -> QuantizedRows:
        return empty_rows(*shape, group=form.group if form else 0, device=placement.device)

    return QuantizedExperts(hidden_size, moe, placement, forms or (None, None), empty, partial(_slot, ops=ops))


def _slot(name: str, own: QuantizedRows, index: tuple[slice, ...], form: Form | None, ops: Fp8Ops) -> WeightSlot:
    return quantized_slot(name, own.values, index, own, form, quantize=ops.quantize_rows if form is None else None)
