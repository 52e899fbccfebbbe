"""Experts in less than 16 bits, whatever their numbers are: GPUs have kernels that take them as they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bough.core.model_config import MoEConfig
from bough.kernels.experts.fp4 import Fp4Rows
from bough.kernels.ops import ExpertMatrices
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.w4_linear.reference import W4Rows
from bough.layers.schemes.base import expert_bias, expert_bias_slots
from bough.layers.schemes.plain import MatrixExperts
from bough.layers.weights import Form, WeightSlot

if TYPE_CHECKING:
    from bough.layers.placement import Placement

Quantized = QuantizedRows | W4Rows | Fp4Rows
Empty = Callable[[tuple[int, ...], Form | None], Quantized]  # matrices [experts, outputs, inputs], not yet filled
# What fills rows of one matrix: its name, they, which part of the tensor they are, and the form to read them in.
Slot = Callable[[str, Any, tuple[slice, ...], Form | None], WeightSlot]


class QuantizedExperts(MatrixExperts):
    """The matrices of one kind behind each other, in the `forms` of gate and up and of down, which are None where no
    checkpoint has given them. Experts that every token passes are a layer of their own."""

    has_shared = False

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        placement: Placement,
        forms: tuple[Form | None, Form | None],
        empty: Empty,
        slot: Slot,
    ) -> None:
        self.moe, self._ops, self._forms, self._slot = moe, placement.ops, forms, slot
        sharers, self._here = placement.topology.in_expert, placement.experts(moe)
        self._held = sharers.slice_of(moe.intermediate_size, "moe_intermediate_size")
        self._inner, count = self._held.stop - self._held.start, len(self._here.held)
        self._biases = expert_bias(hidden_size, self._inner, moe, count, sharers.tp_rank, placement.empty)
        self._gate_up = empty((count, 2 * self._inner, hidden_size), forms[0])
        self._down = empty((count, hidden_size, self._inner), forms[1])
        self.matrices = ExpertMatrices(self._gate_up, self._down, *self._biases, moe.clamped_gate, self._here.spread)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        rows, columns = (self._held,), (slice(None), self._held)
        for place, expert in enumerate(self._here.held):
            for name, matrices, own, index, form in (
                ("gate_proj", self._gate_up, slice(self._inner), rows, self._forms[0]),
                ("up_proj", self._gate_up, slice(self._inner, None), rows, self._forms[0]),
                ("down_proj", self._down, slice(None), columns, self._forms[1]),
            ):
                part = type(matrices)(*(held[place, own] for held in matrices))
                yield self._slot(f"{prefix}{expert}.{name}.weight", part, index, form)
        yield from expert_bias_slots(prefix, self._here.held, *self._biases, self._held)
