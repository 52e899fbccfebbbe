"""The skeleton that encoders share: embed, run the blocks, and hand the hidden states of all tokens back.

An encoder's attention has no mask of the future, so a text is computed in one step and its keys and values are read in
the layer that made them alone. Vectors are pooled from what it gives (`bough.executor.pooling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.blocks import Block
from bough.layers.embedding import Embedding
from bough.layers.label_head import make_label_head
from bough.layers.norm import make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot, slots_of


class Encoder:
    """`block` makes each of its layers."""

    def __init__(
        self, config: ModelConfig, placement: Placement, block: Callable[[ModelConfig, int, Placement], Block]
    ) -> None:
        self.config = config
        self._embedding = Embedding(config.vocab_size, config.hidden_size, 1.0, placement)
        self._places = PlaceTable(config, placement) if config.learned_positions or config.token_types else None
        self._embedding_norm = make_norm(config, placement) if config.embedding_norm else None
        self._blocks = [block(config, layer, placement) for layer in range(config.num_layers)]
        self._norm = make_norm(config, placement) if config.final_norm else None
        self.label_head = make_label_head(config, placement)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x, residual = self._embedding(token_ids, ctx), None
        if self._places is not None:
            x = x + self._places.table.index_select(0, positions)
        if self._embedding_norm is not None:
            x = self._embedding_norm(x, None, ctx)[0]
        for block in self._blocks:
            x, residual = block(x, residual, positions, ctx)
        return x if self._norm is None else self._norm(x, residual, ctx)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """There are none: nobody samples."""
        return hidden

    def slots(self) -> Iterator[WeightSlot]:
        yield from self._embedding.slots("model.embed_tokens.")
        if self._places is not None:
            yield from self._places.slots("model.")
        if self._embedding_norm is not None:
            yield from self._embedding_norm.slots("model.embed_norm.")
        for layer, block in enumerate(self._blocks):
            yield from block.slots(f"model.layers.{layer}.")
        if self._norm is not None:
            yield from slots_of("model.", norm=self._norm)
        if self.label_head is not None:
            yield from self.label_head.slots("score.")


class PlaceTable:
    """What is added to a token's vector for its position and its type: one line for each pair, the positions of the
    second type behind those of the first. Models that rotate have the first type's vector at every position."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        width = config.hidden_size
        self._types = placement.empty(config.token_types, width) if config.token_types else None
        self._positions = torch.zeros_like(placement.empty(config.context_length, width))
        self._learned = config.learned_positions
        self.table = placement.empty(config.positions, width)

    def _store(self, target: torch.Tensor) -> Callable[[int, torch.Tensor], None]:
        def store(first: int, band: torch.Tensor) -> None:
            target[first : first + len(band)].copy_(band)
            by_type = self.table.view(-1, *self._positions.shape)
            by_type.copy_(self._positions.expand_as(by_type))
            if self._types is not None:
                by_type.add_(self._types[: len(by_type), None])

        return store

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._learned:
            rows = (slice(0, len(self._positions)),)
            yield WeightSlot(f"{prefix}embed_positions.weight", self._positions, rows, self._store(self._positions))
        if self._types is not None:
            yield WeightSlot(f"{prefix}embed_types.weight", self._types, store=self._store(self._types))
