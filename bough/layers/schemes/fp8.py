"""Weights as 8-bit floats with a scale for each output, activations quantised as they come, a scale for each token.

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
from bough.kernels.ops import Activation, Norm
from bough.kernels.quantize_rows.reference import FP8, QuantizedRows
from bough.kernels.registry import fp8_ops_for
from bough.kernels.scaled_linear.library import fits
from bough.layers.schemes.base import LinearWeight, Part, Rows, bands, bias_slots
from bough.layers.schemes.plain import PlainWeight
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
    it is."""

    def __init__(
        self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement, form: Form | None = None
    ) -> None:
        self._parts, self._form = tuple(parts), form
        outputs = sum(part.outputs for part in parts)
        self._weight = QuantizedRows(
            torch.empty((outputs, in_features), dtype=FP8, device=placement.device),
            torch.empty((outputs, 1), dtype=torch.float32, device=placement.device),
        )
        self._bias = placement.empty(outputs) if bias else None
        self._dtype = placement.dtype
        self._ops = fp8_ops_for(placement.device)

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        return self._product(x if isinstance(x, QuantizedRows) else self._ops.quantize_rows(x))

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, stream = self._ops.norm_quantize_rows(x, norm.weight, norm.eps, residual, norm.plus_one)
        return self._product(rows), stream

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        return self._ops.gated_quantize_rows(gate_up, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part, rows in bands(self._parts):
            name, values = f"{prefix}{part.name}.weight", self._weight.values[rows]
            if self._form is None:
                yield WeightSlot(name, values, part.index, partial(self._store, rows.start))
            else:
                keep = partial(self._keep, rows.start)
                yield WeightSlot(name, values, part.index, form=self._form, keep=keep)
        yield from bias_slots(prefix, self._parts, self._bias)

    def _product(self, rows: QuantizedRows) -> torch.Tensor:
        return self._ops.scaled_linear(rows, self._weight, self._bias, self._dtype)

    def _store(self, start: int, first: int, band: torch.Tensor) -> None:
        """A row is quantised by itself, so that bands can be: of the whole matrix there is never more than one."""
        self._keep(start, first, self._ops.quantize_rows(band))

    def _keep(self, start: int, first: int, band: KeptRows) -> None:
        assert isinstance(band, QuantizedRows)
        place = slice(start + first, start + first + len(band.values))
        self._weight.values[place].copy_(band.values)
        self._weight.scales[place].copy_(band.scales)
