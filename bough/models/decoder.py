"""The skeleton that decoder-only models share: embed, run the blocks, normalise, and on demand compute logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.blocks import Block
from bough.layers.embedding import Embedding, Head
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
        self._blocks = [block(config, layer, placement) for layer in range(config.num_layers)]
        self._norm = make_norm(config, placement)
        shape = (config.vocab_size, config.hidden_size)
        table = self._embedding.table if config.tied_embeddings else placement.make_table(*shape, placement)
        bias = placement.empty(config.vocab_size) if config.head_bias else None
        self._head = Head(table, config.logit_softcap, placement, config.logit_scale, bias)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x, residual = self._embedding(token_ids, ctx), None
        if self._positions is not None:
            x = x + self._positions.index_select(0, positions)
        inner = ctx if ctx.logits_indices is None else replace(ctx, logits_indices=None)
        for layer, block in enumerate(self._blocks):
            # What nobody asks for is dropped as soon as no key or value depends on it: in the last layer.
            x, residual = block(x, residual, positions, ctx if layer == len(self._blocks) - 1 else inner)
        return self._norm(x, residual, ctx)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)

    def slots(self) -> Iterator[WeightSlot]:
        yield from self._embedding.slots("model.embed_tokens.")
        if self._positions is not None:
            yield WeightSlot("model.embed_positions.weight", self._positions, (slice(0, len(self._positions)),))
        for layer, block in enumerate(self._blocks):
            yield from block.slots(f"model.layers.{layer}.")
        yield from slots_of("model.", norm=self._norm)
        if not self.config.tied_embeddings:
            yield from self._head.slots("lm_head.")
        if self._head.bias is not None:
            yield WeightSlot("lm_head.bias", self._head.bias)
