"""The operations that layers call, as one table: layers never name an implementation, `registry` chooses it.

Every entry has the signature of its plain torch reference. What is often done together has a method of its own, which
composes the entries; a table for a device that has a fused kernel overrides it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from bough.core.model_config import MoEConfig
from bough.kernels.activation.reference import gated_mul
from bough.kernels.embedding.reference import embedding
from bough.kernels.experts.reference import Matrices, Spread, experts, find_places
from bough.kernels.latent_attention.reference import latent_store_
from bough.kernels.lora.reference import AdapterStack, GroupedRows, PackedStack, PairAdapters, lora_
from bough.kernels.norm_rope_store.reference import norm_rope_store_
from bough.kernels.quant_linear.packed import PackedWeight
from bough.kernels.recurrence.reference import causal_conv_, recurrence_
from bough.kernels.rms_norm.reference import rms_norm
from bough.kernels.routing.reference import route
from bough.kernels.sparse_index.reference import index_store_

Activation = Literal["silu", "gelu_tanh", "relu2"]  # the last one of experts alone, which then have no gate
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
WithSum = tuple[torch.Tensor, torch.Tensor]  # what becomes of x + residual, and that sum, which is the next residual
WithNorm = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the same, with the norm between them


class Norm(NamedTuple):
    """An RMS norm: its weight, and the settings that go with it."""

    weight: torch.Tensor
    eps: float
    plus_one: bool


class NormedSum(NamedTuple):
    """The norm of x + residual, which some products take themselves."""

    x: torch.Tensor
    residual: torch.Tensor | None
    norm: Norm

    def taken(self, ops: Ops) -> WithSum:
        """The norm, and the sum."""
        x, residual, norm = self
        return ops.rms_norm(x, norm.weight, norm.eps, residual, norm.plus_one)


class Router(NamedTuple):
    """What chooses the experts of a row."""

    weight: torch.Tensor  # [experts, hidden]
    bias: torch.Tensor | None = None  # [experts], counts when choosing only
    logit_bias: torch.Tensor | None = None  # [experts]


class ExpertMatrices(NamedTuple):
    """What the rows of a mixture of experts are multiplied with."""

    gate_up: Matrices  # [experts, 2 * inner, hidden]: the gate's rows, then up's; or [experts, inner, hidden]: up's
    down: Matrices  # [experts, hidden, inner]
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * inner]
    down_bias: torch.Tensor | None = None  # [experts, hidden]
    clamped_gate: tuple[float, float] | None = None  # instead of the activation: slope and limit of GPT-OSS's gate
    spread: Spread | None = None  # None: all experts are here
    adapted: PairAdapters | None = None  # None: all rows are multiplied with the matrices alone


class Experts(NamedTuple):
    """The experts of a layer, and how they are chosen and gated."""

    moe: MoEConfig
    matrices: ExpertMatrices
    activation: Activation


class PackedExpertWeights(NamedTuple):
    """What `PackedOps.packed_experts` multiplies with."""

    weights: Sequence[PackedWeight]  # gate, up and down of each expert in turn
    gate_up_bias: torch.Tensor | None  # [experts, outputs]
    down_bias: torch.Tensor | None
    adapters: Sequence[PackedStack] = ()  # of gate and up, of down, and of the router


def take_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The rows of x at `places` [n] int64."""
    return x.index_select(0, places)


def grow_queries_(qkv: torch.Tensor, heads: int, positions: torch.Tensor, rate: float, span: int, offset: int) -> None:
    """Multiplies the first `heads` of each token with 1 + rate * ln(1 + (position + offset) // span)."""
    qkv[:, :heads] *= (1 + rate * torch.log1p((positions + offset) // span)).to(qkv.dtype)[:, None, None]


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(logits / cap)`, in float32: a cap squeezes the best logits together, and 16-bit numbers would not
    tell them apart."""
    return torch.tanh(logits.float() / cap).mul_(cap)


def add_gated(a: torch.Tensor, b: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
    """`a + b * sigmoid(logits)`, or `a + b` without a gate."""
    return a + b if logits is None else a + b * logits.sigmoid()


def experts_by_logits(
    x: torch.Tensor,
    logits: torch.Tensor,  # [rows, experts]
    bias: torch.Tensor | None,
    moe: MoEConfig,
    matrices: ExpertMatrices,
    activation: Activation,
    scale: torch.Tensor | None = None,  # [experts], what their weights are multiplied with
) -> torch.Tensor:
    """The weighted sum of the experts that a router's logits choose for each row."""
    ids, weights = route(logits, moe, bias)
    if scale is not None:
        weights = weights * scale[ids]
    if moe.scales_inputs:
        x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
    gate_up, down, gate_up_bias, down_bias, gate, spread, adapted = matrices

    def multiply(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return experts(x, gate_up, down, places, weights, activation, gate_up_bias, down_bias, gate, adapted)

    if spread is not None:
        ids = find_places(ids, spread)
        if spread.dispatch is not None:
            return spread.dispatch(x, ids, weights, multiply)
    return multiply(x, ids, weights)


@dataclass(frozen=True, slots=True)
class Ops:
    """What a model's layers compute with; what a device has no kernel for is plain torch."""

    embedding: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = embedding
    linear: Linear = torch.nn.functional.linear
    rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rms_norm
    gated_mul: Callable[[torch.Tensor, Activation], torch.Tensor] = gated_mul
    norm_rope_store_: Callable[..., None] = norm_rope_store_
    any_heads: bool = False  # whether that does all that its reference does, or only what is usual
    grow_queries_: Callable[[torch.Tensor, int, torch.Tensor, float, int, int], None] = grow_queries_
    take_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = take_rows
    softcap: Callable[[torch.Tensor, float], torch.Tensor] = softcap
    add_gated: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = add_gated
    latent_store_: Callable[..., None] = latent_store_
    index_store_: Callable[..., None] = index_store_
    causal_conv_: Callable[..., torch.Tensor] = causal_conv_
    recurrence_: Callable[..., torch.Tensor] = recurrence_
    lora_: Callable[[torch.Tensor, torch.Tensor, AdapterStack, GroupedRows], None] = lora_
    experts_by_logits: Callable[..., torch.Tensor] = experts_by_logits

    def norm_linear(self, inputs: NormedSum, weight: torch.Tensor, bias: torch.Tensor | None) -> WithSum:
        """The product of the norm."""
        normed, stream = inputs.taken(self)
        return self.linear(normed, weight, bias), stream

    def norm_gate_up(
        self, inputs: NormedSum, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> WithSum:
        """`activation(gate) * up` of the norm; the weight has the gate's rows, then up's."""
        gate_up, stream = self.norm_linear(inputs, weight, bias)
        return self.gated_mul(gate_up, activation), stream

    def routed_experts(self, x: torch.Tensor, router: Router, experts: Experts) -> torch.Tensor:
        """The weighted sum of the experts that the router chooses for each row."""
        logits = self.router_logits(x, router.weight)
        if router.logit_bias is not None:
            logits = logits + router.logit_bias
        return self.experts_by_logits(x, logits, router.bias, *experts)

    def router_logits(self, x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        """The product of the rows and a router [experts, hidden], in float32: rounded to 16 bits, logits of experts
        between which a token is nearly undecided would be the same."""
        return torch.nn.functional.linear(x.float(), router.float())

    def normed_experts(self, inputs: NormedSum, router: Router, experts: Experts) -> WithNorm:
        """The same for the norm of x + residual."""
        normed, stream = inputs.taken(self)
        return self.routed_experts(normed, router, experts), normed, stream

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product at a model's end, in the type of the weight or wider."""
        return self.linear(hidden, weight, None)


REFERENCE = Ops()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOps(Ops):
    """The common operations, and those with packed weights."""

    # Token ids, the table and a scale: the tokens' vectors.
    packed_embedding: Callable[[torch.Tensor, PackedWeight, float], torch.Tensor]
    # Rows, weights whose outputs stand side by side, and a bias: the product.
    packed_linear: Callable[[torch.Tensor, Sequence[PackedWeight], torch.Tensor | None], torch.Tensor]
    # Rows, their router, how it chooses, the experts and their activation.
    packed_experts: Callable[..., torch.Tensor]
    # Adds what adapters make of rows to their product; without rows, of the columns that are the step's token ids.
    packed_lora: Callable[[torch.Tensor, torch.Tensor | None, PackedStack, float], None]
