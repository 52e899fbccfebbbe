"""The skeleton that models share: embed, run the blocks, normalise, and on demand compute logits."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from bough.attention.context import AdaptedRows, ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.blocks import Block
from bough.layers.embedding import Embedding, Head, LabelHead, LayerEnd, LayerInputs, PlaceTable
from bough.layers.norm import NO_NORM, NormLayer, make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot, slots_of


class Decoder:
    """A language model, or a stage of one. `block` makes each of its layers."""

    def __init__(
        self, config: ModelConfig, placement: Placement, block: Callable[[ModelConfig, int, Placement], Block]
    ) -> None:
        self.config, self._placement, topology = config, placement, placement.topology
        self._layers = topology.layers_of(config)
        shape, self._embedding = (config.vocab_size, config.hidden_size), None
        if topology.is_first or (topology.is_last and config.tied_embeddings):
            self._embedding = Embedding(*shape, config.embedding_scale, placement)
        placed = (config.learned_positions or config.token_types) and topology.is_first
        self._places = PlaceTable(config, placement) if placed else None
        self._embed_norm = make_norm(config, placement) if config.embedding_norm else None
        self._layer_inputs = LayerInputs(config, placement) if config.layer_inputs else None
        self._blocks = [block(config, layer, placement) for layer in self._layers]
        ended = self._layers if config.layer_inputs or config.layer_scales else ()
        self._ends = [LayerEnd(config, placement) for _ in ended]
        self._norm: NormLayer | None = None
        self._head, vectors = None, config.vectors
        self.label_head = LabelHead(config, placement) if vectors is not None and vectors.labels else None
        if topology.is_last:
            self._norm = make_norm(config, placement) if config.final_norm else NO_NORM
        if topology.is_last and vectors is None:
            tied = self._embedding if config.tied_embeddings else None
            make = placement.make_head or placement.make_table
            table = make(*shape, placement) if tied is None else tied.table
            bias = placement.empty(config.vocab_size) if config.head_bias else None
            self._head = Head(table, config.logit_softcap, placement, config.logit_scale, bias)

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        asked, residual = None, None
        if self._placement.group is not None:  # other attention groups wait for all tokens, in the last layer too
            self._placement.group.begin_step(len(token_ids))
            asked, ctx = ctx.logits_indices, replace(ctx, logits_indices=None)
        if self._embedding is not None and self._placement.topology.is_first:
            x = self._embedding(token_ids, ctx)
            if ctx.media is not None:
                x = torch.where(ctx.media.here, ctx.media.rows[0].to(x.dtype), x)
        else:
            x = self._placement.ranks.take_over(self._placement.empty(len(token_ids), self.config.hidden_size))
        if self._places is not None:
            x = x + self._places.table.index_select(0, ctx.batch.positions)
        if self._embed_norm is not None:
            x = self._embed_norm(x, None, ctx)[0]
        inputs = None if self._layer_inputs is None else self._layer_inputs(token_ids, x, ctx)
        inner = ctx if ctx.logits_indices is None else replace(ctx, logits_indices=None)
        for place, (layer, block) in enumerate(zip(self._layers, self._blocks, strict=True)):
            # What nobody asks for is dropped as soon as no key or value depends on it: in the last layer.
            own = ctx if layer == self.config.num_layers - 1 else inner
            if ctx.tapped is not None and layer in ctx.tapped:
                ctx.tapped[layer] = x if residual is None else x + residual
            x, residual = block(x, residual, own)
            if ctx.media is not None and layer + 1 < len(ctx.media.rows):
                x = torch.where(ctx.media.here, x + ctx.media.rows[layer + 1].to(x.dtype), x)
            if self._ends:
                assert residual is not None
                x, residual = self._ends[place](x, residual, None if inputs is None else inputs[:, layer], own)
        if self._norm is None:  # the next stage goes on with all tokens, and nobody here asks for any
            self._placement.ranks.pass_on(x if residual is None else x + residual)
            return x[:0]
        hidden = self._norm(x, residual, ctx)[0]
        return hidden if asked is None else hidden.index_select(0, asked)

    def embed(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """The vectors that the first layer is given."""
        assert self._embedding is not None, "only the first stage has it"
        return self._embedding(token_ids, ctx)

    def logits(self, hidden: torch.Tensor, adapted: AdaptedRows | None = None) -> torch.Tensor:
        """Of a model that gives vectors there are none, and nobody samples."""
        return hidden if self._head is None else self._head(hidden, adapted)

    def slots(self) -> Iterator[WeightSlot]:
        if self._embedding is not None:
            yield from self._embedding.slots("model.embed_tokens.")
        if self._places is not None:
            yield from self._places.slots("model.")
        if self._embed_norm is not None:
            yield from self._embed_norm.slots("model.embed_norm.")
        if self._layer_inputs is not None:
            yield from self._layer_inputs.slots("model.")
        for layer, block in zip(self._layers, self._blocks, strict=True):
            yield from block.slots(f"model.layers.{layer}.")
        for layer, end in zip(self._layers, self._ends, strict=False):
            yield from end.slots(f"model.layers.{layer}.")
        if self._norm is not None:
            yield from slots_of("model.", norm=self._norm)
        if self.label_head is not None:
            yield from self.label_head.slots("score.")
        if self._head is None:
            return
        if not self.config.tied_embeddings:
            yield from self._head.slots("lm_head.")
        if self._head.bias is not None:
            yield WeightSlot("lm_head.bias", self._head.bias)
