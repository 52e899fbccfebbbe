"""The index of sparse attention as a layer: its norm and its share in the projections of the attention that it serves.

Its heads are few and small: every rank has all of them, so that all choose the same tokens.
"""

from collections.abc import Iterator, Sequence

import torch

from bough.attention.base import IndexQueries
from bough.attention.context import ForwardContext
from bough.core.model_config import IndexConfig
from bough.layers.linear import Columns
from bough.layers.placement import Placement
from bough.layers.rope import RopeTable
from bough.layers.weights import WeightSlot

EPS = 1e-6


class SparseIndex:
    """That of one layer which chooses. `rope` is that of the layer."""

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
        self._index_store_(q, keys, self._weight, self._bias, EPS, rope.cos, rope.sin, positions, slots, cache)
        return IndexQueries(q, weights)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}k_norm.weight", self._weight)
        yield WeightSlot(f"{prefix}k_norm.bias", self._bias)
