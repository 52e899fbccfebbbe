"""Weights as 8-bit floats with a scale for each output, or as a checkpoint has them, for every 128 inputs of it;
activations quantised as they come, with a scale for each token, or for every 128 of its values.

Both sides of a product then have 8 bits, which GPUs multiply twice as fast as 16 and read in half the time. Quantising
the activations is part of the kernel before the product: the norm, or the gate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import MoEConfig
from bough.kernels.ops import Activation, Norm
from bough.kernels.quantize_rows.reference import QuantizedRows, empty_rows
from bough.kernels.registry import Fp8Ops, fp8_ops_for
from bough.kernels.scaled_linear.library import fits
from bough.kernels.scaled_linear.reference import FEW_ROWS
from bough.layers.schemes.base import ExpertWeights, LinearWeight, Part, Router, Rows, bands, bias_slots
from bough.layers.schemes.plain import PlainExperts, PlainWeight
from bough.layers.weights import Form, KeptRows, WeightSlot

if TYPE_CHECKING:
    from bough.layers.placement import Placement

log = logging.getLogger(__name__)


class Fp8Scheme:
    """Makes 8-bit weights of all layers that the product takes, and remembers which others it has spoken of."""

    def __init__(self) -> None:
        self._left_plain: set[tuple[int, int]] = set()

    def __call__(self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
        shape = (sum(part.outputs for part in parts), in_features)
        if fits(in_features, shape[0]):
            return Fp8Weight(in_features, parts, bias, placement)
        if shape not in self._left_plain:
            self._left_plain.add(shape)
            names = ", ".join(part.name for part in parts)
            log.warning("%s: %d x %d are no multiples of 16; these weights stay %s", names, *shape, placement.dtype)
        return PlainWeight(in_features, parts, bias, placement)


class Fp8Weight(LinearWeight):
    """A matrix that is quantised while it is loaded, or, with a `form`, that the checkpoint has so; its bias stays as
    it is. A few rows are not quantised for a matrix in groups."""

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

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._takes_plain(x):
            normed, stream = self._ops.rms_norm(x, norm.weight, norm.eps, residual, norm.plus_one)
            return self.linear(normed, ctx), stream
        rows, stream = self._fp8.norm_quantize_rows(x, norm.weight, norm.eps, residual, norm.plus_one, self._group)
        return self._product(rows), stream

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        if self._takes_plain(gate_up):
            return (self._ops.silu_mul if activation == "silu" else self._ops.gelu_tanh_mul)(gate_up)
        return self._fp8.gated_quantize_rows(gate_up, activation, self._group)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part, rows in bands(self._parts):
            own = QuantizedRows(*(held[rows] for held in self._weight))
            yield _slot(f"{prefix}{part.name}.weight", own, part.index, self._form, self._fp8)
        yield from bias_slots(prefix, self._parts, self._bias)

    def _takes_plain(self, x: torch.Tensor) -> bool:
        return self._group > 0 and x.shape[0] <= FEW_ROWS

    def _product(self, rows: QuantizedRows) -> torch.Tensor:
        return self._fp8.scaled_linear(rows, self._weight, self._bias, self._dtype)


def fp8_experts(hidden_size: int, moe: MoEConfig, placement: Placement) -> ExpertWeights:
    """Experts that are quantised while they are loaded, where GPUs have kernels for them."""
    if not moe.has_kernels:
        return PlainExperts(hidden_size, moe, placement)
    return Fp8Experts(hidden_size, moe, placement)


class Fp8Experts:
    """Experts that are quantised while they are loaded, or, with the `forms` of gate and up and of down, that the
    checkpoint has so. Those that every token passes are a layer of their own."""

    has_shared = False

    def __init__(
        self, hidden_size: int, moe: MoEConfig, placement: Placement, forms: tuple[Form, Form] | None = None
    ) -> None:
        self._moe, self._ops, self._fp8 = moe, placement.ops, fp8_ops_for(placement.device)
        self._held = placement.topology.slice_of(moe.intermediate_size, "moe_intermediate_size")
        self._inner = self._held.stop - self._held.start
        self._forms = forms or (None, None)
        sides = ((2 * self._inner, hidden_size), (hidden_size, self._inner))
        self._gate_up, self._down = (
            empty_rows(moe.experts, *side, group=form.group if form else 0, device=placement.device)
            for side, form in zip(sides, self._forms, strict=True)
        )

    def __call__(self, x: torch.Tensor, router: Router, activation: Activation, ctx: ForwardContext) -> torch.Tensor:
        settings = (router.weight, router.bias, self._moe, self._gate_up, self._down, activation)
        return self._ops.routed_experts(x, *settings)

    def after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        router: Router,
        activation: Activation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        settings = (router.weight, router.bias, self._moe, self._gate_up, self._down, activation)
        return self._ops.normed_experts(x, residual, norm, *settings)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        rows, columns = (self._held,), (slice(None), self._held)
        for expert in range(self._moe.experts):
            for name, matrices, own, index, form in (
                ("gate_proj", self._gate_up, slice(self._inner), rows, self._forms[0]),
                ("up_proj", self._gate_up, slice(self._inner, None), rows, self._forms[0]),
                ("down_proj", self._down, slice(None), columns, self._forms[1]),
            ):
                part = QuantizedRows(*(held[expert, own] for held in matrices))
                yield _slot(f"{prefix}{expert}.{name}.weight", part, index, form, self._fp8)


def _slot(name: str, own: QuantizedRows, index: tuple[slice, ...], form: Form | None, ops: Fp8Ops) -> WeightSlot:
    """Fills `own`. A row is quantised by itself, so that bands can be: of a whole matrix there is never more than
    one."""

    def keep(first: int, band: KeptRows) -> None:
        assert isinstance(band, QuantizedRows)
        for held, given in zip(own, band, strict=True):
            held[first : first + len(given)].copy_(given)

    if form is not None:
        return WeightSlot(name, own.values, index, form=form, keep=keep, held=tuple(own))
    return WeightSlot(
        name, own.values, index, lambda first, band: keep(first, ops.quantize_rows(band)), held=tuple(own)
    )
