"""Weights in the type of the activations, multiplied by the device's table of operations; and experts in less than 16
bits, whatever their numbers are: GPUs have kernels in that table that take them as they are kept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from bough.attention.context import ForwardContext
from bough.core.model_config import MoEConfig
from bough.kernels.experts.fp4 import Fp4Rows
from bough.kernels.ops import Activation, ExpertMatrices, Experts, NormedSum, Ops, Router, WithNorm, WithSum
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.w4_linear.reference import W4Rows
from bough.layers.placement import Placement
from bough.layers.schemes.base import Gate, LinearWeight, Part, Rows, bands, bias_slots, expert_bias, expert_bias_slots
from bough.layers.weights import Form, WeightSlot

Quantized = QuantizedRows | W4Rows | Fp4Rows
Empty = Callable[[tuple[int, ...], Form | None], Quantized]  # matrices [experts, outputs, inputs], not yet filled
# What fills rows of one matrix: its name, they, which part of the tensor they are, and the form to read them in.
Slot = Callable[[str, Any, tuple[slice, ...], Form | None], WeightSlot]


class PlainWeight(LinearWeight):
    """A matrix as the checkpoint has it."""

    def __init__(self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> None:
        self._parts = tuple(parts)
        outputs = sum(part.outputs for part in parts)
        self._weight = placement.empty(outputs, in_features)
        self._bias = placement.empty(outputs) if bias else None
        self._ops = placement.ops

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "quantised rows are for quantised weights"
        return self._ops.linear(x, self._weight, self._bias)

    def after_norm(self, inputs: NormedSum, ctx: ForwardContext) -> WithSum:
        return self._ops.norm_linear(inputs, self._weight, self._bias)

    def gated_after_norm(self, inputs: NormedSum, activation: Activation, gate: Gate, ctx: ForwardContext) -> WithSum:
        return self._ops.norm_gate_up(inputs, self._weight, self._bias, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part, rows in bands(self._parts):
            yield WeightSlot(f"{prefix}{part.name}.weight", self._weight[rows], part.index)
        yield from bias_slots(prefix, self._parts, self._bias)


class MatrixExperts:
    """Experts whose matrices the device's table of operations takes as they are kept."""

    moe: MoEConfig
    _ops: Ops
    matrices: ExpertMatrices

    def __call__(self, x: torch.Tensor, router: Router, activation: Activation, ctx: ForwardContext) -> torch.Tensor:
        return self._ops.routed_experts(x, router, Experts(self.moe, self.matrices, activation))

    def after_norm(self, inputs: NormedSum, router: Router, activation: Activation, ctx: ForwardContext) -> WithNorm:
        return self._ops.normed_experts(inputs, router, Experts(self.moe, self.matrices, activation))

    def by_logits(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        scale: torch.Tensor | None,
        activation: Activation,
        ctx: ForwardContext,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._ops.experts_by_logits(x, logits, bias, self.moe, self.matrices, activation, scale)


class PlainExperts(MatrixExperts):
    """Experts as the checkpoint has them, the matrices of one kind behind each other."""

    def __init__(self, hidden_size: int, moe: MoEConfig, placement: Placement) -> None:
        # Shared experts join them, which saves launches, unless their results or the others' inputs are scaled or are
        # latents, or all ranks share them while the others are spread, or choices are counted.
        self._here = placement.experts(moe)
        apart = moe.shared_gate or moe.scales_inputs or moe.latent_size or self._here.spread is not None
        joins = not (apart or moe.biases or moe.shared_size % moe.intermediate_size)
        self._appended = moe.shared_size // moe.intermediate_size if joins else 0
        self.moe, self._ops = replace(moe, appended=self._appended), placement.ops
        sharers = placement.topology.in_expert
        self._held = sharers.slice_of(moe.intermediate_size, "moe_intermediate_size")
        inner = self._held.stop - self._held.start
        self._held_shared = placement.topology.slice_of(self._appended * moe.intermediate_size, "shared_size")
        count = len(self._here.held) + self._appended
        self._gate_up = placement.empty(count, len(moe.inputs) * inner, hidden_size)
        self._down = placement.empty(count, hidden_size, inner)
        self._biases = expert_bias(hidden_size, inner, moe, count, sharers.tp_rank, placement.empty)
        self.matrices = ExpertMatrices(self._gate_up, self._down, *self._biases, moe.clamped_gate, self._here.spread)

    @property
    def has_shared(self) -> bool:
        return self._appended > 0

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for place, expert in enumerate(self._here.held):
            yield from self._slots_of(f"{prefix}{expert}.", place, self._held)
        yield from expert_bias_slots(prefix, self._here.held, *self._biases, self._held)
        inner, first = self._down.shape[2], self._held_shared.start
        for number in range(self._appended):  # they are one MLP in checkpoints, which is cut into experts
            own = slice(first + number * inner, first + (number + 1) * inner)
            shared = prefix.removesuffix("experts.") + "shared_experts."
            yield from self._slots_of(shared, self.moe.experts + number, own)

    def _slots_of(self, prefix: str, place: int, held: slice) -> Iterator[WeightSlot]:
        parts = torch.split(self._gate_up[place], self._down.shape[2])
        for name, own in zip(self.moe.inputs, parts, strict=True):
            yield WeightSlot(f"{prefix}{name}.weight", own, (held,))
        yield WeightSlot(f"{prefix}down_proj.weight", self._down[place], (slice(None), held))


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
        self._gate_up = empty((count, len(moe.inputs) * self._inner, hidden_size), forms[0])
        self._down = empty((count, hidden_size, self._inner), forms[1])
        self.matrices = ExpertMatrices(self._gate_up, self._down, *self._biases, moe.clamped_gate, self._here.spread)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        inner, rows, columns = self._inner, (self._held,), (slice(None), self._held)
        parts = [(name, slice(at * inner, (at + 1) * inner)) for at, name in enumerate(self.moe.inputs)]
        for place, expert in enumerate(self._here.held):
            for name, own in parts:
                part = type(self._gate_up)(*(held[place, own] for held in self._gate_up))
                yield self._slot(f"{prefix}{expert}.{name}.weight", part, rows, self._forms[0])
            part = type(self._down)(*(held[place] for held in self._down))
            yield self._slot(f"{prefix}{expert}.down_proj.weight", part, columns, self._forms[1])
        yield from expert_bias_slots(prefix, self._here.held, *self._biases, self._held)


class PlainTable:
    """A vocabulary's vectors as the checkpoint has them."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self.weight = placement.empty(vocab_size, hidden_size)
        self._ops = placement.ops

    def embed(self, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self._ops.embedding(token_ids, self.weight, scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.logits(hidden, self.weight)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self.weight)


class ShardedTable:
    """A vocabulary shared among ranks: each has a run of the tokens, all of one length but the last ones. A vector is
    the sum of what the ranks know of it; logits are gathered, so every rank has all."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        topology = placement.topology
        self._vocab_size, self._width = vocab_size, -(-vocab_size // topology.tp_size)
        first = min(topology.tp_rank * self._width, vocab_size)
        self._held = slice(first, min(first + self._width, vocab_size))
        self._own = PlainTable(self._held.stop - first, hidden_size, placement)
        self._ranks = placement.ranks

    def embed(self, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        elsewhere = (token_ids < self._held.start) | (token_ids >= self._held.stop)
        vectors = self._own.embed((token_ids - self._held.start).masked_fill(elsewhere, 0), scale)
        return self._ranks.all_reduce(vectors.masked_fill(elsewhere[:, None], 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._own.logits(hidden)
        return self._ranks.all_gather(pad(own, (0, self._width - own.shape[1])))[:, : self._vocab_size].contiguous()

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self._own.weight, (self._held,))
