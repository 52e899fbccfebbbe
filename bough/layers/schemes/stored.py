"""Weights of a quantised checkpoint in the numbers that it has, on a GPU: 8-bit floats, 4-bit integers, and experts of
4-bit floats. Weights that have no product in their own numbers, and those that the checkpoint has not quantised, are
kept by another scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import MoEConfig
from bough.kernels.experts.fp4 import GROUP as FP4_GROUP
from bough.kernels.experts.fp4 import Fp4Rows
from bough.kernels.experts.fp4 import fits as fits_fp4
from bough.kernels.experts.fp4 import pack as pack_fp4
from bough.kernels.ops import Activation, ExpertMatrices, Norm, Router
from bough.kernels.registry import w4_ops_for
from bough.kernels.scaled_linear.library import fits as fits_fp8
from bough.kernels.w4_linear.reference import IntegerRows, W4Rows, pack, words_of
from bough.kernels.w4_linear.reference import fits as fits_w4
from bough.layers.schemes.base import (
    ExpertWeights,
    Gate,
    LinearWeight,
    Part,
    Rows,
    bands,
    bias_slots,
    expert_bias_slots,
)
from bough.layers.schemes.fp8 import Fp8Weight
from bough.layers.schemes.plain import Memory, PlainExperts
from bough.layers.weights import Form, KeptRows, WeightSlot

if TYPE_CHECKING:
    from bough.layers.placement import Placement, WeightMaker

FormOf = Callable[[str], Form | None]  # of a tensor, by its name; None: it is not quantised, or only to be dequantised


class StoredScheme:
    """Makes weights in the forms of a checkpoint; `others` makes those that have none."""

    def __init__(self, form_of: FormOf, others: WeightMaker) -> None:
        self._form_of, self._others = form_of, others

    def __call__(self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
        return StoredWeight(partial(self._make, in_features, parts, bias, placement))

    def _make(
        self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement, prefix: str
    ) -> LinearWeight:
        forms = {self._form_of(f"{prefix}{part.name}.weight") for part in parts}
        form = forms.pop() if len(forms) == 1 else None
        if form is not None and form.inputs == in_features:  # else this rank has a part of the inputs
            if form.kind == "int4" and fits_w4(in_features, form.group):
                return W4Weight(in_features, parts, bias, placement, form)
            if form.kind == "fp8" and fits_fp8(in_features, sum(part.outputs for part in parts)):
                return Fp8Weight(in_features, parts, bias, placement, form)
        return self._others(in_features, parts, bias, placement)

    def experts(self, hidden_size: int, moe: MoEConfig, placement: Placement) -> ExpertWeights:
        fits = fits_fp4(hidden_size) and fits_fp4(moe.intermediate_size)
        if fits and placement.topology.tp_size == 1 and not moe.shared_size:
            return StoredExperts(partial(self._make_experts, hidden_size, moe, placement))
        return PlainExperts(hidden_size, moe, placement)

    def _make_experts(self, hidden_size: int, moe: MoEConfig, placement: Placement, prefix: str) -> ExpertWeights:
        parts = ("gate_proj", "up_proj", "down_proj")
        forms = [self._form_of(f"{prefix}{i}.{part}.weight") for i in range(moe.experts) for part in parts]
        kept = all(form is not None and form.kind == "fp4" for form in forms)
        return (Fp4Experts if kept else PlainExperts)(hidden_size, moe, placement)


class StoredWeight(LinearWeight):
    """A weight whose form is known when it is to be filled: only then has its layer a name."""

    def __init__(self, make: Callable[[str], LinearWeight]) -> None:
        self._make = make
        self._made: LinearWeight | None = None

    @property
    def _weight(self) -> LinearWeight:
        assert self._made is not None, "no checkpoint has been read into this weight"
        return self._made

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        return self._weight.linear(x, ctx)

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._weight.after_norm(x, residual, norm, ctx)

    def gated_after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        activation: Activation,
        gate: Gate,
        ctx: ForwardContext,
    ) -> tuple[Rows, torch.Tensor]:
        return self._weight.gated_after_norm(x, residual, norm, activation, gate, ctx)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        return self._weight.gate(gate_up, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._made is None:
            self._made = self._make(prefix)
        return self._made.slots(prefix)


class W4Weight(LinearWeight):
    """A matrix of 4-bit integers; activations stay as they are."""

    def __init__(self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement, form: Form) -> None:
        self._parts, self._form, self._ops = tuple(parts), form, placement.ops
        outputs, groups = sum(part.outputs for part in parts), in_features // form.group
        device = placement.device
        self._rows = W4Rows(
            torch.empty((outputs, words_of(in_features)), dtype=torch.int32, device=device),
            torch.empty((outputs, groups), dtype=torch.float16, device=device),
            torch.empty((outputs, groups), dtype=torch.uint8, device=device),
        )
        self._bias = placement.empty(outputs) if bias else None
        self._w4 = w4_ops_for(device)

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "quantised rows are for weights of 8 bits"
        return self._w4.linear(x, self._rows, self._bias)

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._w4.norm_linear is not None and x.shape[0] == 1:
            return self._w4.norm_linear(x, residual, norm, self._rows, self._bias)
        normed, stream = self._ops.rms_norm(x, norm.weight, norm.eps, residual, norm.plus_one)
        return self.linear(normed, ctx), stream

    def gated_after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        activation: Activation,
        gate: Gate,
        ctx: ForwardContext,
    ) -> tuple[Rows, torch.Tensor]:
        if self._w4.norm_gate_up is not None and x.shape[0] == 1 and self._bias is None:
            return self._w4.norm_gate_up(x, residual, norm, self._rows, activation)
        return super().gated_after_norm(x, residual, norm, activation, gate, ctx)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        return (self._ops.silu_mul if activation == "silu" else self._ops.gelu_tanh_mul)(gate_up)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part, rows in bands(self._parts):
            shape = torch.empty(part.outputs, self._form.inputs, device="meta")
            held = tuple(tensor[rows] for tensor in self._rows)
            keep = partial(self._keep, rows.start)
            name = f"{prefix}{part.name}.weight"
            yield WeightSlot(name, shape, part.index, form=self._form, keep=keep, held=held)
        yield from bias_slots(prefix, self._parts, self._bias)

    def _keep(self, start: int, first: int, band: KeptRows) -> None:
        assert isinstance(band, IntegerRows)
        place = slice(start + first, start + first + len(band.codes))
        for tensor, packed in zip(self._rows, pack(band), strict=True):
            tensor[place].copy_(packed)


class StoredExperts(ExpertWeights):
    """Experts whose form is known when they are to be filled. None of them is shared."""

    has_shared = False

    def __init__(self, make: Callable[[str], ExpertWeights]) -> None:
        self._make = make
        self._made: ExpertWeights | None = None

    @property
    def _experts(self) -> ExpertWeights:
        assert self._made is not None, "no checkpoint has been read into these experts"
        return self._made

    def __call__(self, x: torch.Tensor, router: Router, activation: Activation, ctx: ForwardContext) -> torch.Tensor:
        return self._experts(x, router, activation, ctx)

    def after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        router: Router,
        activation: Activation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._experts.after_norm(x, residual, norm, router, activation, ctx)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._made is None:
            self._made = self._make(prefix)
        return self._made.slots(prefix)


class Fp4Experts(PlainExperts):
    """Experts of 4-bit floats; biases and activations stay as they are."""

    def _empty(self, gate_up: tuple[int, ...], down: tuple[int, ...], placement: Memory) -> ExpertMatrices:
        def packed(shape: tuple[int, ...], inputs: int) -> torch.Tensor:
            """Bytes, of which each holds so many inputs."""
            return torch.empty((*shape[:2], shape[2] // inputs), dtype=torch.uint8, device=placement.device)

        powers = (packed(gate_up, FP4_GROUP), packed(down, FP4_GROUP))
        return ExpertMatrices(packed(gate_up, 2), packed(down, 2), powers=powers)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        matrices = self._matrices
        assert matrices.powers is not None
        for expert in range(self._moe.experts):
            gate, up = zip(*(tensor[expert].chunk(2) for tensor in (matrices.gate_up, matrices.powers[0])), strict=True)
            down = (matrices.down[expert], matrices.powers[1][expert])
            for part, held in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                inputs = 2 * held[0].shape[1]
                shape, form = torch.empty(len(held[0]), inputs, device="meta"), Form("fp4", inputs, FP4_GROUP)
                name, keep = f"{prefix}{expert}.{part}.weight", partial(self._keep, held)
                yield WeightSlot(name, shape, form=form, keep=keep, held=held)
        yield from expert_bias_slots(prefix, matrices.gate_up_bias, matrices.down_bias)

    @staticmethod
    def _keep(held: tuple[torch.Tensor, ...], first: int, band: KeptRows) -> None:
        assert isinstance(band, Fp4Rows)
        for target, rows in zip(held, (pack_fp4(band.codes), band.powers), strict=True):
            target[first : first + len(rows)].copy_(rows)
