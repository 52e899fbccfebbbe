"""The skeleton that decoder-only models share: embed, run the blocks, normalise, and on demand compute logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.blocks import Block
from bough.layers.embedding import Embedding, Head
from bough.layers.layer_inputs import LayerEnd, LayerInputs
from bough.layers.norm import make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot, slots_of


class Decoder:
    """A causal language model. `block` makes each of its layers."""

    def __init__(
        self, config: ModelConfig, placement: Placement, block: Callable[[ModelConfig, int, Placement], Block]
    ) -> None:
        self.config = config
        self._embedding = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale, placement)
        shape = (config.context_length, config.hidden_size)
        self._positions = placement.empty(*shape) if config.learned_positions else None
        self._layer_inputs = LayerInputs(config, placement) if config.layer_inputs else None
        self._blocks = [block(config, layer, placement) for layer in range(config.num_layers)]
        ended = config.num_layers if config.layer_inputs or config.layer_scales else 0
        self._ends = [LayerEnd(config, placement) for _ in range(ended)]
        self._norm = make_norm(config, placement)
        shape = (config.vocab_size, config.hidden_size)
        table = self._embedding.table if config.tied_embeddings else placement.make_table(*shape, placement)
        bias = placement.empty(config.vocab_size) if config.head_bias else None
        self._head = Head(table, config.logit_softcap, placement, config.logit_scale, bias)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x, residual = self._embedding(token_ids, ctx), None
        if self._positions is not None:
            x = x + self._positions.index_select(0, positions)
        inputs = None if self._layer_inputs is None else self._layer_inputs(token_ids, x, ctx)
        inner = ctx if ctx.logits_indices is None else replace(ctx, logits_indices=None)
        for layer, block in enumerate(self._blocks):
            # What nobody asks for is dropped as soon as no key or value depends on it: in the last layer.
            own = ctx if layer == len(self._blocks) - 1 else inner
            x, residual = block(x, residual, positions, own)
            if self._ends:
                x, residual = self._ends[layer](x, residual, None if inputs is None else inputs[:, layer], own)
        return self._norm(x, residual, ctx)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)

    def slots(self) -> Iterator[WeightSlot]:
        yield from self._embedding.slots("model.embed_tokens.")
        if self._positions is not None:
            yield WeightSlot("model.embed_positions.weight", self._positions, (slice(0, len(self._positions)),))
        if self._layer_inputs is not None:
            yield from self._layer_inputs.slots("model.")
        for layer, block in enumerate(self._blocks):
            yield from block.slots(f"model.layers.{layer}.")
        for layer, end in enumerate(self._ends):
            yield from end.slots(f"model.layers.{layer}.")
        yield from slots_of("model.", norm=self._norm)
        if not self.config.tied_embeddings:
            yield from self._head.slots("lm_head.")
        if self._head.bias is not None:
            yield WeightSlot("lm_head.bias", self._head.bias)
