"""The feed-forward part of a block: an MLP, with a gate or without, or a mixture of experts, which has a router, the
experts that it chooses among, and those that every token passes.

Each is a block over the norm of x + residual, and returns the result and that sum. The inner width of an MLP, and of
each expert, is shared among ranks; the router is on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig, MoEConfig
from bough.distributed.group import ALONE, AttentionGroup
from bough.kernels.activation.reference import PLAIN
from bough.kernels.ops import Activation, NormedSum, PackedOps, Router, WithSum
from bough.layers.adapters import AdaptedExperts
from bough.layers.linear import ColumnLinear, Columns, Products, RowLinear
from bough.layers.norm import Inputs, make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot, slots_of


class GatedMLP(Products):
    """down(activation(gate(x)) * up(x)), the inner width shared among ranks."""

    def __init__(self, config: ModelConfig, placement: Placement, size: int | None = None) -> None:
        if config.activation not in ("silu", "gelu_tanh", "gelu"):
            raise ModelError(f"Gated MLPs have the activation silu, gelu_tanh or gelu here, not {config.activation}.")
        held = placement.topology.slice_of(size or config.intermediate_size, "intermediate_size")
        parts = (Columns("gate_proj", held), Columns("up_proj", held))
        self._gate_up = ColumnLinear(config.hidden_size, parts, config.mlp_bias, placement)
        self._down = RowLinear("down_proj", held, config.hidden_size, config.mlp_bias, placement)
        self._exact = config.activation == "gelu"  # which no kernel has beside the product
        self.activation: Activation = "gelu_tanh" if config.activation == "gelu" else config.activation

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        if self._exact:
            inner, total = self._gate_up.after(inputs, ctx)
            gate, up = inner.chunk(2, dim=-1)
            return self._down(F.gelu(gate) * up, ctx), total
        gated, total = self._gate_up.gated_after(inputs, self.activation, self._down.gate, ctx)
        return self._down(gated, ctx), total


class PlainMLP(Products):
    """down(activation(up(x))), the inner width shared among ranks."""

    def __init__(self, config: ModelConfig, placement: Placement, size: int | None = None) -> None:
        held = placement.topology.slice_of(size or config.intermediate_size, "intermediate_size")
        self._up = ColumnLinear(config.hidden_size, (Columns("up_proj", held),), config.mlp_bias, placement)
        self._down = RowLinear("down_proj", held, config.hidden_size, config.mlp_bias, placement)
        self._activate = PLAIN[config.activation]

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        inner, total = self._up.after(inputs, ctx)
        return self._down(self._activate(inner), ctx), total


class MoE:
    """The weighted sum of some experts of each token, plus that of the shared experts."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, placement: Placement) -> None:
        if config.activation not in ("silu", "gelu_tanh", "relu2") or moe.gated == (config.activation == "relu2"):
            which = "with gates have the activation silu or gelu_tanh" if moe.gated else "without gates have relu2"
            raise ModelError(f"Experts {which} here, not {config.activation}.")
        self._activation = config.activation
        bias = placement.empty(moe.experts).float() if moe.correction_bias else None
        logit_bias = placement.empty(moe.experts) if moe.biases else None
        self._router = Router(placement.empty(moe.experts, config.hidden_size), bias, logit_bias)
        hidden, latent = config.hidden_size, moe.latent_size
        self._experts = placement.make_experts(latent or hidden, moe, placement)
        self._latents = (placement.empty(latent, hidden), placement.empty(hidden, latent)) if latent else None
        self._all_reduce = placement.ranks.all_reduce  # one exchange for routed and shared experts together
        apart = moe.shared_size and not self._experts.has_shared
        kind: type[GatedMLP] | type[PlainMLP] = GatedMLP if moe.gated else PlainMLP
        self._shared = kind(config, replace(placement, ranks=ALONE), moe.shared_size) if apart else None
        self._ops = placement.ops
        self._shared_gate = placement.empty(1, hidden) if moe.shared_gate else None
        self._linear = F.linear if isinstance(self._ops, PackedOps) else self._ops.linear  # the gate's is not packed

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        x, residual, norm = inputs
        if norm.rms is not None and self._latents is None:
            summed = NormedSum(x, residual, norm.rms)
            out, normed, total = self._experts.after_norm(summed, self._router, self._activation, ctx)
        else:
            normed, total = inputs.taken(ctx)
            out = self._routed(normed, ctx)
        if self._shared is not None:
            shared = self._shared(Inputs(normed), ctx)[0]
            logits = None if self._shared_gate is None else self._linear(normed, self._shared_gate, None)
            if logits is not None and isinstance(self._experts, AdaptedExperts):
                self._experts.shared_gate.add_step_(logits, normed, ctx)
            out = self._ops.add_gated(out, shared, logits)
        return self._all_reduce(out), total

    def _routed(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        if self._latents is None:
            return self._experts(x, self._router, self._activation, ctx)
        narrowed, logits = self._ops.linear(x, self._latents[0], None), self._ops.router_logits(x, self._router.weight)
        found = self._experts.by_logits(narrowed, logits, None, self._activation, ctx, self._router.bias)
        return self._ops.linear(found, self._latents[1], None)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}gate.weight", self._router.weight)
        for number, matrix in enumerate(self._latents or (), 1):
            yield WeightSlot(f"{prefix}fc{number}_latent_proj.weight", matrix)
        if self._router.logit_bias is not None:
            yield WeightSlot(f"{prefix}gate.bias", self._router.logit_bias)
        if self._router.bias is not None:
            yield WeightSlot(f"{prefix}gate.e_score_correction_bias", self._router.bias)
        yield from self._experts.slots(f"{prefix}experts.")
        if self._shared is not None:
            yield from self._shared.slots(f"{prefix}shared_experts.")
        if self._shared_gate is not None:
            yield WeightSlot(f"{prefix}shared_expert_gate.weight", self._shared_gate[0])


class ExpertsBesideMLP:
    """The sum of an MLP and of experts, each after a norm and before another; the router has a norm of its own."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, placement: Placement) -> None:
        self._mlp = GatedMLP(config, placement)
        self._activation = self._mlp.activation
        names = ("mlp_norm", "experts_input_norm", "experts_norm", "router_norm")
        self._norms = {name: make_norm(config, placement) for name in names}
        self._router = placement.empty(moe.experts, config.hidden_size)
        self._expert_scale = placement.empty(moe.experts)
        self._experts = placement.make_experts(config.hidden_size, moe, placement)
        self._all_reduce, self._linear = placement.ranks.all_reduce, placement.ops.linear

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        out, total = self._mlp(inputs, ctx)
        normed, routed = (self._norms[name](total, None, ctx)[0] for name in ("experts_input_norm", "router_norm"))
        logits = self._linear(routed, self._router, None)
        if isinstance(self._experts, AdaptedExperts):
            self._experts.router.add_step_(logits, routed, ctx)
        logits = logits.float() * routed.shape[1] ** -0.5
        found = self._experts.by_logits(normed, logits, self._expert_scale, self._activation, ctx)
        found = self._norms["experts_norm"](self._all_reduce(found), None, ctx)[0]
        return self._norms["mlp_norm"](out, None, ctx)[0] + found, total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._mlp.slots(prefix)
        yield from slots_of(prefix, **self._norms)
        yield WeightSlot(f"{prefix}gate.weight", self._router)
        yield WeightSlot(f"{prefix}gate.expert_scale", self._expert_scale)
        yield from self._experts.slots(f"{prefix}experts.")


class AcrossGroups:
    """A block that the ranks of all attention groups share: it gets the tokens of all."""

    def __init__(self, block: Block, group: AttentionGroup | None) -> None:
        self._block, self._group = block, group

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        total = inputs.x if inputs.residual is None else inputs.x + inputs.residual
        assert self._group is not None, "shapes alone compute nothing"
        out = self._block(Inputs(self._group.gather_rows(total), None, inputs.norm), ctx)[0]
        return self._group.own_rows(out), total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        return self._block.slots(prefix)


Block = GatedMLP | PlainMLP | MoE | ExpertsBesideMLP | AcrossGroups


def make_mlp(config: ModelConfig, layer: int, placement: Placement) -> Block:
    """What this layer of the model has behind its attention."""
    moe = config.experts_of(layer)
    sent = moe is not None and placement.spread.options.all_to_all  # which reaches the ranks of all groups by itself
    if placement.topology.dp_size > 1 and not sent:
        return AcrossGroups(make_mlp(config, layer, placement.all_groups), placement.group)
    if moe is not None and moe.beside_mlp:
        return ExpertsBesideMLP(config, moe, placement)
    if moe is not None:
        return MoE(config, moe, placement)
    return GatedMLP(config, placement) if config.mlp == "gated" else PlainMLP(config, placement)
