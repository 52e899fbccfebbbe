"""Weights in the type of the activations, multiplied by the device's table of operations."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import MoEConfig
from bough.distributed.topology import Topology
from bough.kernels.ops import Activation, ExpertMatrices, Experts, NormedSum, Ops, Router, WithNorm, WithSum
from bough.layers.schemes.base import Gate, Part, Rows, bands, bias_slots, expert_bias_slots, expert_biases
from bough.layers.spread import LayerExperts
from bough.layers.weights import WeightSlot


class Memory(Protocol):
    """What plain weights need of a `Placement`."""

    @property
    def ops(self) -> Ops: ...

    @property
    def topology(self) -> Topology: ...

    def empty(self, *shape: int) -> torch.Tensor: ...

    def experts(self, moe: MoEConfig) -> LayerExperts: ...


class PlainWeight:
    """A matrix as the checkpoint has it."""

    def __init__(self, in_features: int, parts: Sequence[Part], bias: bool, placement: Memory) -> None:
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

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        return self._ops.gated_mul(gate_up, activation)

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
        self, x: torch.Tensor, logits: torch.Tensor, scale: torch.Tensor, activation: Activation, ctx: ForwardContext
    ) -> torch.Tensor:
        return self._ops.experts_by_logits(x, logits, None, self.moe, self.matrices, activation, scale)


class PlainExperts(MatrixExperts):
    """Experts as the checkpoint has them, the matrices of one kind behind each other."""

    def __init__(self, hidden_size: int, moe: MoEConfig, placement: Memory) -> None:
        # Shared experts join them, which saves launches, unless their results or the others' inputs are scaled, or all
        # ranks share them while the others are spread, or choices are counted.
        self._here = placement.experts(moe)
        apart = moe.shared_gate or moe.scales_inputs or self._here.spread is not None
        joins = not (apart or moe.biases or moe.shared_size % moe.intermediate_size)
        self._appended = moe.shared_size // moe.intermediate_size if joins else 0
        self.moe, self._ops = replace(moe, appended=self._appended), placement.ops
        sharers = placement.topology.in_expert
        self._held = sharers.slice_of(moe.intermediate_size, "moe_intermediate_size")
        inner = self._held.stop - self._held.start
        self._held_shared = placement.topology.slice_of(self._appended * moe.intermediate_size, "shared_size")
        count = len(self._here.held) + self._appended
        self._gate_up = placement.empty(count, 2 * inner, hidden_size)
        self._down = placement.empty(count, hidden_size, inner)
        self._biases = expert_biases(hidden_size, inner, moe, count, sharers.tp_rank, placement.empty)
        self.matrices = ExpertMatrices(self._gate_up, self._down, *self._biases, moe.clamped_gate, self._here.spread)

    @property
    def has_shared(self) -> bool:
        return self._appended > 0

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        inner, held = self._down.shape[2], self._held
        for place, expert in enumerate(self._here.held):
            yield WeightSlot(f"{prefix}{expert}.gate_proj.weight", self._gate_up[place, :inner], (held,))
            yield WeightSlot(f"{prefix}{expert}.up_proj.weight", self._gate_up[place, inner:], (held,))
            yield WeightSlot(f"{prefix}{expert}.down_proj.weight", self._down[place], (slice(None), held))
        yield from expert_bias_slots(prefix, self._here.held, *self._biases, held)
        if self._appended:
            yield from self._shared_slots(prefix.removesuffix("experts.") + "shared_experts.")

    def _shared_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The shared experts are one MLP in checkpoints, which is cut into experts."""
        inner, held, first = self._down.shape[2], self._held_shared, self.moe.experts
        for name, rows in (("gate_proj", slice(None, inner)), ("up_proj", slice(inner, None))):
            cut = self._gate_up[first:, rows]
            shape = torch.empty(len(cut) * inner, cut.shape[2], dtype=cut.dtype, device="meta")
            yield WeightSlot(f"{prefix}{name}.weight", shape, (held,), store=partial(_fill_rows, cut), held=(cut,))
        columns = self._down[first:].transpose(0, 1)  # [hidden, shared, inner]
        shape = torch.empty(len(columns), len(self._down[first:]) * inner, dtype=columns.dtype, device="meta")
        store = partial(_fill_columns, columns)
        yield WeightSlot(f"{prefix}down_proj.weight", shape, (slice(None), held), store=store, held=(columns,))


def _fill_rows(matrices: torch.Tensor, first: int, band: torch.Tensor) -> None:
    """Copies a band to its rows, those of the matrices [n, rows, inputs] one below the other."""
    height, last = matrices.shape[1], first + len(band)
    for number, matrix in enumerate(matrices):
        begin, end = max(first, number * height), min(last, (number + 1) * height)
        if begin < end:
            matrix[begin - number * height : end - number * height].copy_(band[begin - first : end - first])


def _fill_columns(columns: torch.Tensor, first: int, band: torch.Tensor) -> None:
    columns[first : first + len(band)].copy_(band.view(len(band), *columns.shape[1:]))


class PlainTable:
    """A vocabulary's vectors as the checkpoint has them."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Memory) -> None:
        self.weight = placement.empty(vocab_size, hidden_size)
        self._ops = placement.ops

    def embed(self, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self._ops.embedding(token_ids, self.weight, scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.logits(hidden, self.weight)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self.weight)
