"""Latent attention as a layer: the projections to queries and latents, and the store of the latents, around a back end.

Every rank stores the latents of all tokens, and has the matrices and queries of its own heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from bough.attention.base import IndexQueries, LatentSpec
from bough.attention.context import ForwardContext
from bough.core.model_config import IndexConfig, ModelConfig
from bough.kernels.ops import WithSum
from bough.layers.linear import ColumnLinear, Columns, Products, RowLinear
from bough.layers.norm import Inputs, RmsNorm
from bough.layers.placement import Placement
from bough.layers.rope import RopeTable
from bough.layers.weights import WeightSlot, slots_of

INNER_EPS = 1e-6  # of the norms between projections and of the index, whatever the model's others have


class LatentAttention(Products):
    """Attention of one layer, with this rank's share of the heads."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        latent = config.latent
        assert latent is not None, "the model has no latent attention"
        heads = placement.topology.slice_of(config.num_heads, "num_heads")
        query = Columns("q_proj", slice(heads.start * config.head_dim, heads.stop * config.head_dim))
        first, rank = query, latent.query_rank
        self._rope = placement.rope(config.rope, latent.rope_dim, config.context_length)
        self._index: SparseIndex | None = None
        if latent.index is not None and latent.index.chooses(layer):
            self._index = SparseIndex(latent.index, layer, self._rope, placement)
        self._query_up: ColumnLinear | None = None
        if rank is not None:
            first = Columns("q_a_proj", slice(0, rank))
            made = (replace(query, name="q_b_proj"), *(() if self._index is None else (self._index.of_query,)))
            self._query_up = ColumnLinear(rank, made, False, placement)
            self._query_widths = [column.size for column in made]
            self._query_norm = RmsNorm(rank, INNER_EPS, False, placement)
        columns = [first, Columns("kv_a_proj_with_mqa", slice(0, latent.width))]
        columns += () if self._index is None else self._index.of_hidden
        self._down = ColumnLinear(config.hidden_size, columns, False, placement)
        self._widths = [column.size for column in columns]
        self._latent_norm = RmsNorm(latent.rank, INNER_EPS, False, placement)
        own = slice(heads.start * latent.value_dim, heads.stop * latent.value_dim)
        self._output = RowLinear("o_proj", own, config.hidden_size, False, placement)
        of_head = latent.nope_dim + latent.value_dim
        self._made = slice(heads.start * of_head, heads.stop * of_head)
        self._spec = LatentSpec(
            layer=layer,
            scale=config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
            latent=latent,
            weight=placement.empty(heads.stop - heads.start, of_head, latent.rank),
            group=config.kv_group(layer),
        )
        self._spec_of_ends = replace(self._spec, ends_only=True)
        self._thin = None if placement.make_latents is None else placement.make_latents(latent, heads, placement)
        self._head_dim = config.head_dim
        self._ops = placement.ops

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        """Attends with the norm of x + residual; returns the result and that sum, at `ctx.logits_indices`."""
        spec, pool = self._spec if ctx.logits_indices is None else self._spec_of_ends, ctx.pool
        if self._thin is not None and ctx.adapters is not None:
            spec = replace(spec, adapted=self._thin.of(ctx.adapters))
        projected, total = self._down.after(inputs, ctx)
        query, latents, *of_index = torch.split(projected, self._widths, dim=1)
        if self._query_up is not None:
            made, _ = self._query_up.after(Inputs(query, None, self._query_norm), ctx)
            query, *index_queries = torch.split(made, self._query_widths, dim=1)
        q, slots = query.view(len(query), spec.heads, self._head_dim), ctx.batch.slots[spec.group]
        # The latents of all tokens are stored before any row attends: a row may read pages that another row of the
        # same step writes (see `bough.core.plan`).
        norm, rope = self._latent_norm.rms, self._rope
        places = (ctx.batch.positions, slots, pool.keys[spec.layer], pool.key_scales[spec.layer])
        self._ops.latent_store_(q, latents, norm.weight, norm.eps, rope.cos, rope.sin, *places)
        index = None
        if self._index is not None:
            index = self._index(index_queries[0], of_index, slots, ctx)
        ctx.wait_for(spec.layer)
        attended = ctx.attention.run_latent(q, latents, spec, pool, index).flatten(1)
        if ctx.logits_indices is not None:
            attended, total = (self._ops.take_rows(rows, ctx.logits_indices) for rows in (attended, total))
        return self._output(attended, ctx), total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().slots(prefix)
        if self._query_up is not None:
            yield from slots_of(prefix, q_a_layernorm=self._query_norm)
        yield from slots_of(prefix, kv_a_layernorm=self._latent_norm)
        if self._index is not None:
            yield from slots_of(prefix, indexer=self._index)
        if self._thin is not None:
            self._thin.prefix = prefix
        yield WeightSlot(f"{prefix}kv_b_proj.weight", self._spec.weight.flatten(0, 1), (self._made,))


class SparseIndex:
    """The index of one layer which chooses, with its norm and its share in the projections. `rope` is that of the
    layer. Its heads are few and small: every rank has all of them, so that all choose the same tokens."""

    def __init__(self, index: IndexConfig, layer: int, rope: RopeTable, placement: Placement) -> None:
        self._layer, self._rope = layer, rope
        self._shape = (index.heads, index.head_dim)
        self.of_hidden = (
            Columns("indexer.wk", slice(0, index.head_dim)),
            Columns("indexer.weights_proj", slice(0, index.heads)),
        )
        self.of_query = Columns("indexer.wq_b", slice(0, index.heads * index.head_dim))
        self._weight, self._bias = placement.empty(index.head_dim), placement.empty(index.head_dim)
        self._index_store_ = placement.ops.index_store_

    def __call__(
        self, queries: torch.Tensor, of_hidden: Sequence[torch.Tensor], slots: torch.Tensor, ctx: ForwardContext
    ) -> IndexQueries:
        """Stores the keys; what the attention chooses by."""
        q, (keys, weights) = queries.view(len(queries), *self._shape), of_hidden
        rope, positions, cache = self._rope, ctx.batch.positions, ctx.pool.index_keys[self._layer]
        self._index_store_(q, keys, self._weight, self._bias, INNER_EPS, rope.cos, rope.sin, positions, slots, cache)
        return IndexQueries(q, weights)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}k_norm.weight", self._weight)
        yield WeightSlot(f"{prefix}k_norm.bias", self._bias)
