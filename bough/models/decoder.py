"""The skeleton that decoder-only models share: embed, run the blocks, normalise, and on demand compute logits.

An architecture gives it the class of its blocks and where its tensors stand in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.embedding import Embedding, Head
from bough.layers.norm import RmsNorm
from bough.layers.placement import Placement
from bough.layers.rope import RopeTable, rope_table
from bough.layers.weights import WeightSlot


class Block(Protocol):
    """One layer of a decoder.

    The stream of hidden states travels as two tensors whose sum it is, `x` and `residual`, so that each addition is
    done together with the norm that follows it. Before the first block there is no residual.
    """

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None: ...

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rope: RopeTable,
        positions: torch.Tensor,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def slots(self, prefix: str) -> Iterator[WeightSlot]: ...


class Decoder:
    """A causal language model made of equal blocks."""

    def __init__(self, config: ModelConfig, placement: Placement, block: type[Block], prefix: str = "") -> None:
        self.config = config
        self._prefix = prefix
        self._embedding = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale, placement)
        self._blocks = [block(config, layer, placement) for layer in range(config.num_layers)]
        self._norm = RmsNorm(config.hidden_size, config.norm_eps, config.norm_plus_one, placement)
        tied = config.tied_embeddings
        shape = (config.vocab_size, config.hidden_size)
        table = self._embedding.table if tied else placement.make_table(*shape, placement)
        self._head = Head(table, config.logit_softcap, placement)
        angles = (config.head_dim, config.context_length, placement.device)
        self._rope = rope_table(config.rope, *angles)
        self._local_rope = self._rope if config.local_rope is None else rope_table(config.local_rope, *angles)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x, residual = self._embedding(token_ids), None
        inner = ctx if ctx.logits_indices is None else replace(ctx, logits_indices=None)
        for layer, block in enumerate(self._blocks):
            rope = self._local_rope if self.config.slides(layer) else self._rope
            # What nobody asks for is dropped as soon as no key or value depends on it: in the last layer.
            x, residual = block(x, residual, rope, positions, ctx if layer == len(self._blocks) - 1 else inner)
        return self._norm(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)

    def slots(self) -> Iterator[WeightSlot]:
        prefix = self._prefix
        yield from self._embedding.slots(f"{prefix}model.embed_tokens")
        for layer, block in enumerate(self._blocks):
            yield from block.slots(f"{prefix}model.layers.{layer}.")
        yield from self._norm.slots(f"{prefix}model.norm")
        if not self.config.tied_embeddings:
            yield from self._head.slots(f"{prefix}lm_head")
