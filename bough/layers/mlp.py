"""The feed-forward part of a block, with a gate or without."""

from collections.abc import Iterator

import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.kernels.activation.reference import PLAIN
from bough.kernels.ops import Activation, WithSum
from bough.layers.linear import ColumnLinear, Columns, RowLinear
from bough.layers.norm import Inputs
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class GatedMLP:
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
        """The block over the norm of x + residual; returns the result and that sum."""
        if self._exact:
            inner, total = self._gate_up.after(inputs, ctx)
            gate, up = inner.chunk(2, dim=-1)
            return self._down(F.gelu(gate) * up, ctx), total
        gated, total = self._gate_up.gated_after(inputs, self.activation, self._down.gate, ctx)
        return self._down(gated, ctx), total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._gate_up.slots(prefix)
        yield from self._down.slots(prefix)


class PlainMLP:
    """down(activation(up(x))), the inner width shared among ranks."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        held = placement.topology.slice_of(config.intermediate_size, "intermediate_size")
        self._up = ColumnLinear(config.hidden_size, (Columns("up_proj", held),), config.mlp_bias, placement)
        self._down = RowLinear("down_proj", held, config.hidden_size, config.mlp_bias, placement)
        self._activate = PLAIN[config.activation]

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        """The block over the norm of x + residual; returns the result and that sum."""
        inner, total = self._up.after(inputs, ctx)
        return self._down(self._activate(inner), ctx), total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._up.slots(prefix)
        yield from self._down.slots(prefix)
