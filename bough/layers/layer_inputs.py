"""What a layer gets of each token beside the hidden states, and what it does with that behind its block (Gemma 4)."""

from collections.abc import Iterator

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.embedding import Embedding
from bough.layers.linear import ColumnLinear, Columns, Products
from bough.layers.norm import Inputs, RmsNorm, make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot, slots_of


class LayerInputs:
    """A vector for each layer and token: one that is looked up, and the norm of a product of the token's embedding."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self._shape = (config.num_layers, config.layer_inputs)
        width = config.num_layers * config.layer_inputs
        self._embedding = Embedding(config.vocab_size, width, config.layer_inputs**0.5, placement)
        columns = Columns("per_layer_model_projection", slice(0, width))
        self._product = ColumnLinear(config.hidden_size, (columns,), False, placement)
        # The product is divided by the root of its inputs, of which the norm leaves only the weight of epsilon.
        eps = config.norm_eps * config.hidden_size
        self._norm = RmsNorm(config.layer_inputs, eps, config.norm_plus_one, placement)

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[tokens, layers, layer_inputs]"""
        product = self._product(embedded, ctx).view(-1, *self._shape)
        found = self._embedding(token_ids, ctx).view(-1, *self._shape)
        return (self._norm(product, None, ctx)[0] + found).mul_(0.5**0.5)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._embedding.slots(f"{prefix}embed_tokens_per_layer.")
        yield from self._product.slots(prefix)
        yield from self._norm.slots(f"{prefix}per_layer_projection_norm.")


class LayerEnd(Products):
    """Adds a product of the layer's inputs, gated by the hidden states, and multiplies all with the layer's scale."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self._scale = placement.empty(1) if config.layer_scales else None
        self._ops, width = placement.ops, config.layer_inputs
        self._inputs = width > 0
        if self._inputs:
            gate, product = Columns("per_layer_input_gate", slice(0, width)), slice(0, config.hidden_size)
            self._gate = ColumnLinear(config.hidden_size, (gate,), False, placement)
            self._product = ColumnLinear(width, (Columns("per_layer_projection", product),), False, placement)
            self._norm = make_norm(config, placement)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, inputs: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and gives hidden states as a block does; `inputs` [tokens, layer_inputs]."""
        if inputs is not None:
            if ctx.logits_indices is not None:
                inputs = self._ops.take_rows(inputs, ctx.logits_indices)
            gate, residual = self._gate.after(Inputs(x, residual), ctx)
            gated = self._ops.gated_mul(torch.cat((gate, inputs), dim=-1), "gelu_tanh")
            x = self._norm(self._product(gated, ctx), None, ctx)[0]
        return (x, residual) if self._scale is None else (x * self._scale, residual * self._scale)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._scale is not None:
            yield WeightSlot(f"{prefix}layer_scalar", self._scale)
        yield from super().slots(prefix)
        if self._inputs:
            yield from slots_of(prefix, post_per_layer_input_norm=self._norm)
