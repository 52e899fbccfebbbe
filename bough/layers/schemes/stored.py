"""Weights in fewer than 16 bits on a GPU, as a quantised checkpoint has them or quantised while they are loaded: 8-bit
floats, 4-bit integers, and experts of 4-bit floats. Weights that have no product in their own numbers, and those that
the checkpoint has not quantised, are kept by another scheme.

8-bit floats have a scale for each output, or for every 128 inputs of it; activations are quantised as they come, with a
scale for each token, or for every 128 of its values. Both sides of a product then have 8 bits, which GPUs multiply
twice as fast as 16 and read in half the time. Quantising the activations is part of the kernel before the product: the
norm, or the gate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import MoEConfig
from bough.kernels.experts import fp4
from bough.kernels.experts.fp4 import Fp4Rows
from bough.kernels.ops import Activation, NormedSum, WithSum
from bough.kernels.quantize_rows.reference import SMALLEST_AMAX, QuantizedRows, empty_rows
from bough.kernels.registry import Fp8Ops, fp8_ops_for, w4_ops_for
from bough.kernels.scaled_linear.reference import FEW_ROWS, FEWEST_ROWS
from bough.kernels.scaled_linear.reference import fits as fits_fp8
from bough.kernels.w4_linear.reference import W4Rows, group_for, pack, quantize, words_of
from bough.kernels.w4_linear.reference import fits as fits_w4
from bough.layers.schemes.base import ExpertWeights, Gate, LinearWeight, Part, Rows, TellOnce, bands, bias_slots
from bough.layers.schemes.plain import PlainExperts, PlainWeight, QuantizedExperts
from bough.layers.weights import Filled, Form, WeightSlot, quantized_slot

if TYPE_CHECKING:
    from bough.layers.placement import ExpertsMaker, Placement, TableMaker, WeightMaker

log = logging.getLogger(__name__)
LARGEST = 127
BAND = 16384  # vectors of a head that are widened at once: more would only take memory
FormOf = Callable[[str], Form | None]  # of a tensor, by its name; None: it is not quantised, or only to be dequantised


class Fp8Scheme:
    """Makes 8-bit weights of all layers that the product takes, and remembers which others it has spoken of."""

    def __init__(self) -> None:
        self._tell = TellOnce(log)

    def __call__(self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
        outputs = sum(part.outputs for part in parts)
        if fits_fp8(in_features, outputs):
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
            yield _fp8_slot(f"{prefix}{part.name}.weight", own, part.index, self._form, self._fp8)
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

    return QuantizedExperts(hidden_size, moe, placement, forms or (None, None), empty, partial(_fp8_slot, ops=ops))


def _fp8_slot(name: str, own: QuantizedRows, index: tuple[slice, ...], form: Form | None, ops: Fp8Ops) -> WeightSlot:
    return quantized_slot(name, own.values, index, own, form, quantize=ops.quantize_rows if form is None else None)


class StoredScheme:
    """Makes weights in the forms of a checkpoint, of each this rank's share; `others` and `other_experts` make those
    that have none. What is widened for its size is named once."""

    def __init__(self, form_of: FormOf, others: WeightMaker, other_experts: ExpertsMaker) -> None:
        self._form_of, self._others, self._other_experts = form_of, others, other_experts
        self._once = TellOnce(log)

    def __call__(self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
        return cast(LinearWeight, Named(partial(self._make, in_features, parts, bias, placement)))

    def _make(
        self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement, prefix: str
    ) -> LinearWeight:
        forms = {self._form_of(f"{prefix}{part.name}.weight") for part in parts}
        form = forms.pop() if len(forms) == 1 else None
        if form is not None:
            own, outputs = form.cut(parts[0].index), sum(part.outputs for part in parts)  # all have the same inputs
            if own is not None and own.inputs == in_features:  # else the weights are another configuration's
                if own.kind == "int4" and fits_w4(in_features, own.group):
                    return W4Weight(in_features, parts, bias, placement, own)
                if own.kind == "fp8" and (own.group > 0 or fits_fp8(in_features, outputs)):
                    return Fp8Weight(in_features, parts, bias, placement, own)
            self._tell([part.name for part in parts], form, own, (outputs, in_features))
        return self._others(in_features, parts, bias, placement)

    def experts(self, hidden_size: int, moe: MoEConfig, placement: Placement) -> ExpertWeights:
        alone = replace(moe, shared_size=0)  # those that every token passes may have another form
        return cast(ExpertWeights, Named(partial(self._make_experts, hidden_size, alone, placement)))

    def _make_experts(self, hidden_size: int, moe: MoEConfig, placement: Placement, prefix: str) -> ExpertWeights:
        names = [f"{prefix}{expert}.{{}}.weight" for expert in range(moe.experts)]
        both = moe.inputs, ("down_proj",)
        kinds = [{self._form_of(name.format(part)) for name in names for part in parts} for parts in both]
        gate_up, down = (forms.pop() if len(forms) == 1 else None for forms in kinds)
        held = placement.topology.in_expert.slice_of(moe.intermediate_size, "moe_intermediate_size")
        if gate_up is not None and down is not None:
            own, inner = down.cut((slice(None), held)), held.stop - held.start
            if own is not None and (gate_up.inputs, own.inputs) == (hidden_size, inner):
                if gate_up.kind == own.kind == "fp8":
                    return fp8_experts(hidden_size, moe, placement, (gate_up, own))
                if all(form.kind == "int4" and fits_w4(form.inputs, form.group) for form in (gate_up, own)):
                    return w4_experts(hidden_size, moe, placement, (gate_up, own))
                if gate_up.kind == own.kind == "fp4":
                    return fp4_experts(hidden_size, moe, placement, (gate_up, own))
            self._tell(["experts"], down, own, (hidden_size, inner))
        return self._other_experts(hidden_size, moe, placement)

    def _tell(self, names: Sequence[str], form: Form, own: Form | None, shape: tuple[int, int]) -> None:
        why = f"{form} has no product" if own is not None else f"this rank's inputs are no whole groups of {form.group}"
        self._once(f"{', '.join(names)}: {why} for {shape[0]} x {shape[1]}; these weights are dequantised")


class Named:
    """Stands for a weight whose form is known when it is to be filled: only then has its layer a name. Whatever is
    asked of it later, it asks of that weight."""

    has_shared = False  # of experts

    def __init__(self, make: Callable[[str], Filled]) -> None:
        self._make = make
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        assert self._made is not None, "no checkpoint has been read into this weight"
        return getattr(self._made, name)

    def __call__(self, *arguments: Any) -> Any:
        return self._made(*arguments)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._made is None:
            self._made = self._make(prefix)
        yield from self._made.slots(prefix)


class W4Weight(LinearWeight):
    """A matrix of 4-bit integers, which the checkpoint has so or, if it is not `stored`, that is quantised while it is
    loaded; activations stay as they are."""

    def __init__(
        self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement, form: Form, stored: bool = True
    ) -> None:
        self._parts, self._form, self._stored, self._ops = tuple(parts), form, stored, placement.ops
        outputs = sum(part.outputs for part in parts)
        self._rows = _empty((outputs, in_features), form, placement.device)
        self._bias = placement.empty(outputs) if bias else None
        self._w4 = w4_ops_for(placement.device)

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "quantised rows are for weights of 8 bits"
        return self._w4.linear(x, self._rows, self._bias)

    def after_norm(self, inputs: NormedSum, ctx: ForwardContext) -> WithSum:
        if self._w4.norm_linear is not None and len(inputs.x) == 1:
            return self._w4.norm_linear(*inputs, self._rows, self._bias)
        return super().after_norm(inputs, ctx)

    def gated_after_norm(
        self, inputs: NormedSum, activation: Activation, gate: Gate, ctx: ForwardContext
    ) -> tuple[Rows, torch.Tensor]:
        if self._w4.norm_gate_up is not None and len(inputs.x) == 1 and self._bias is None:
            return self._w4.norm_gate_up(*inputs, self._rows, activation)
        return super().gated_after_norm(inputs, activation, gate, ctx)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part, rows in bands(self._parts):
            own = W4Rows(*(tensor[rows] for tensor in self._rows))
            yield _slot(f"{prefix}{part.name}.weight", own, part.index, self._form, stored=self._stored)
        yield from bias_slots(prefix, self._parts, self._bias)


class W4Scheme:
    """Makes weights that are quantised to 4 bits while they are loaded, if they can be; names others once."""

    def __init__(self) -> None:
        self._tell = TellOnce(log)

    def __call__(self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
        group = group_for(in_features)
        if group is None:
            self._tell_plain(", ".join(part.name for part in parts), (in_features,), placement)
            return PlainWeight(in_features, parts, bias, placement)
        return W4Weight(in_features, parts, bias, placement, Form("int4", in_features, group), stored=False)

    def experts(self, hidden_size: int, moe: MoEConfig, placement: Placement) -> ExpertWeights:
        inner = placement.topology.in_expert.share(moe.intermediate_size, "moe_intermediate_size")
        groups = group_for(hidden_size), group_for(inner)
        if groups[0] is None or groups[1] is None:
            self._tell_plain("experts", (hidden_size, inner), placement)
            return PlainExperts(hidden_size, moe, placement)
        forms = (Form("int4", hidden_size, groups[0]), Form("int4", inner, groups[1]))
        return w4_experts(hidden_size, moe, placement, forms, stored=False)

    def _tell_plain(self, names: str, inputs: tuple[int, ...], placement: Placement) -> None:
        counts = " and ".join(map(str, inputs))
        self._tell(f"{names}: {counts} inputs are no multiple of 32; these weights stay {placement.dtype}")


def w4_experts(
    hidden_size: int, moe: MoEConfig, placement: Placement, forms: tuple[Form, Form], stored: bool = True
) -> ExpertWeights:
    """Experts of 4-bit integers."""
    empty = partial(_empty, device=placement.device)
    return QuantizedExperts(hidden_size, moe, placement, forms, empty, partial(_slot, stored=stored))


def fp4_experts(hidden_size: int, moe: MoEConfig, placement: Placement, forms: tuple[Form, Form]) -> ExpertWeights:
    """Experts of 4-bit floats."""

    def empty(shape: tuple[int, ...], form: Form | None) -> Fp4Rows:
        words = torch.empty((*shape[:-1], words_of(shape[-1])), dtype=torch.int32, device=placement.device)
        powers = torch.empty((*shape[:-1], shape[-1] // fp4.GROUP), dtype=torch.uint8, device=placement.device)
        return Fp4Rows(words, powers)

    return QuantizedExperts(hidden_size, moe, placement, forms, empty, partial(_slot, pack=fp4.pack))


def _empty(shape: tuple[int, ...], form: Form | None, device: torch.device) -> W4Rows:
    assert form is not None
    outputs, groups = shape[:-1], shape[-1] // form.group
    return W4Rows(
        torch.empty((*outputs, words_of(shape[-1])), dtype=torch.int32, device=device),
        torch.empty((*outputs, groups), dtype=torch.float16, device=device),
        torch.empty((*outputs, groups), dtype=torch.uint8, device=device),
    )


def _slot(
    name: str,
    own: W4Rows | Fp4Rows,
    index: tuple[slice, ...],
    form: Form | None,
    pack: Callable[[Any], Iterable[torch.Tensor]] = pack,
    stored: bool = True,
) -> WeightSlot:
    assert form is not None
    shape, group = torch.empty(len(own.words), form.inputs, device="meta"), form.group
    return quantized_slot(name, shape, index, own, form, pack, None if stored else partial(quantize, group=group))


class Int8Head:
    """The head of a model whose layers have 4 bits: a vocabulary's vectors as 8-bit integers with a scale for each,
    half of what the logits of a few rows read.

    Integers, since 8-bit floats cost SmolLM2 1.8 % of its perplexity here, and these 0.05 %. Scales have the bits of a
    bfloat16, so that vectors can be widened in one step.
    """

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self._dtype, device = placement.dtype, placement.device
        values = torch.empty(vocab_size, hidden_size, dtype=torch.int8, device=device)
        self._weight = QuantizedRows(values, torch.empty(vocab_size, 1, dtype=torch.float32, device=device))
        self._few_rows = fp8_ops_for(device).weight_linear

    def embed(self, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self._widened(token_ids) * scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) <= FEW_ROWS:
            return self._few_rows(hidden, self._weight, None)
        out = hidden.new_empty(len(hidden), len(self._weight.values))
        for first in range(0, out.shape[1], BAND):
            band = slice(first, first + BAND)
            torch.mm(hidden, self._widened(band).t(), out=out[:, band])
        return out

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self._weight.values, store=self._store, held=tuple(self._weight))

    def _store(self, first: int, band: torch.Tensor) -> None:
        amax = band.float().abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST_AMAX)
        scales = (amax * ((1 + 2**-7) / LARGEST)).bfloat16().float()  # rounded, yet never too small
        values, rows = (band.float() / scales).round_(), slice(first, first + len(band))
        self._weight.values[rows] = values.to(torch.int8)
        self._weight.scales[rows] = scales

    def _widened(self, which: slice | torch.Tensor) -> torch.Tensor:
        return self._weight.values[which] * self._weight.scales[which].to(self._dtype)


def makers_for(quantization: str) -> tuple[WeightMaker, ExpertsMaker, TableMaker | None]:
    """By the name that `--quantization` has for it, what makes the weights of one model, its experts, and its head,
    unless that is made as tables are: 4 bits of a vocabulary alone would cost more than those of all layers."""
    if quantization == "fp8":
        return Fp8Scheme(), fp8_experts, None
    if quantization == "int4":
        scheme = W4Scheme()
        return scheme, scheme.experts, Int8Head
    return PlainWeight, PlainExperts, None
