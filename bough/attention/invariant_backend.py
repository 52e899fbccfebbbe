"""The back end of deterministic inference: one kernel for every token, whatever its step looks like.

Decodes, chunks of prompts and their cached prefixes are all read from the pages, in blocks and chunks at fixed places
of the sequence (see `kernels.invariant_attention`). Owns the list of items of the decodes and the memory for their
partial results, one for each window and shape of heads that the layers have.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from bough.attention.base import AttentionBackend, AttentionSpec, IndexQueries, LatentSpec, Reading
from bough.attention.batch import AttentionBatch
from bough.attention.latent_prompts import SparseLatents
from bough.kernels.invariant_attention.triton import (
    ITEM_FIELDS,
    DecodeItems,
    InvariantConfig,
    invariant_attention,
    prefill_items,
)
from bough.kernels.latent_attention.triton import absorb, lift
from bough.memory.pools.kv_pool import KVPool

ANY_TOKENS = 16  # of a tile, however many tokens there are


class Places(NamedTuple):
    """Where rows read; as `invariant_attention` takes it."""

    page_table: torch.Tensor
    rows: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    prompts: torch.Tensor | None  # items of those that are no decodes
    page_size: int


class InvariantAttention(AttentionBackend):
    """Attention of at most `max_batch` rows on a GPU. `to_device` takes small arrays there. The two configurations, for
    decodes and for prompts, must be such that a token has the same bits by either."""

    def __init__(
        self,
        to_device: Callable[[npt.NDArray[Any]], torch.Tensor],
        max_batch: int,
        config: InvariantConfig,
        prompt_config: InvariantConfig,
        device: torch.device,
    ) -> None:
        self._to_device = to_device
        self._max_batch = max_batch
        assert (config.chunk, config.block_n) == (prompt_config.chunk, prompt_config.block_n)
        self._config, self._prompt_config = config, prompt_config
        self._decode_starts = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._works: dict[Reading, DecodeItems] = {}
        self._planned: set[Reading] = set()
        self._batch: AttentionBatch | None = None
        self._query_starts = self._decode_starts
        self._prefills: torch.Tensor | None = None
        self._sparse = SparseLatents()

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._planned.clear()
        self._sparse.prepare()
        n = batch.decodes
        if n == len(batch.query_lens):  # nothing comes from the host: the step can be captured
            self._query_starts, self._prefills = self._decode_starts, None
            return
        items = prefill_items(batch.query_lens[n:], batch.context_lens[n:], self._prompt_config.block_queries, n)
        self._query_starts, self._prefills = self._to_device(batch.query_starts), self._to_device(items)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "prepare() comes before run()"
        tables, starts = (batch.page_tables[layer.group], batch.rows), self._query_starts
        return self._attend(q, layer, pool, Places(*tables, starts, batch.lengths, self._prefills, batch.page_size))

    def _attend(self, q: torch.Tensor, layer: AttentionSpec, pool: KVPool, places: Places) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        width = pool.values[layer.layer].shape[2]
        work = self._work(batch, layer, places.lengths, width, q.device)
        out = torch.empty((q.shape[0], layer.heads, width), dtype=q.dtype, device=q.device)
        launches = []  # items, programs, rows that may be split, configuration
        if batch.decodes:
            programs = work.programs(batch.decodes, layer.heads // self._config.pack)
            launches.append((work.items, programs, batch.decodes, self._config))
        if places.prompts is not None:
            launches.append((places.prompts, len(places.prompts) - 1, 0, self._prompt_config))
        for items, programs, split_rows, config in launches:
            own = layer.scores(pool) | {"programs": programs, "split_rows": split_rows, "config": config}
            own |= {"partials": work.partials, "page_size": places.page_size, "chunked": layer.chunked, "out": out}
            invariant_attention(q, *(*layer.caches(pool), *places[:4]), items, **own)
        return out

    def run_latent(
        self, q: torch.Tensor, latents: torch.Tensor, layer: LatentSpec, pool: KVPool, index: IndexQueries | None = None
    ) -> torch.Tensor:
        """All rows in the absorbed form, whose arithmetic does not depend on how many queries a row has."""
        weight, nope_dim = layer.weight, layer.latent.nope_dim
        queries = absorb(q, weight, nope_dim, block_t=ANY_TOKENS)
        if layer.top is None:
            attended = self.run(queries, latents, latents, layer.absorbed, pool)
        else:
            attended = self._attend(queries, layer.absorbed, pool, self._read_lists(layer, pool, index))
        return lift(attended, weight, nope_dim, block_t=ANY_TOKENS)

    def _read_lists(self, layer: LatentSpec, pool: KVPool, index: IndexQueries | None) -> Places:
        """Of sparse attention every token is a row, and its list the row's pages."""
        batch = self._batch
        assert batch is not None, "prepare() comes before run_latent()"
        n, starts = batch.decodes, None if self._prefills is None else self._query_starts
        slots, lengths, places = self._sparse.choose(index, layer, pool, batch, starts)
        items = None
        if starts is not None:
            items = torch.full((1 + len(lengths) - n, ITEM_FIELDS), -1, dtype=torch.int32, device=slots.device)
            items[0, 0], items[1:, 0], items[1:, 1] = len(lengths) - n, places[n:-1], 0
        return Places(slots, places[:-1], places, lengths, items, 1)

    def _work(
        self, batch: AttentionBatch, layer: AttentionSpec, lengths: torch.Tensor, width: int, device: torch.device
    ) -> DecodeItems:
        """The items of this step's decodes; planned by the first layer that reads so."""
        reading = layer.reading
        work = self._works.get(reading)
        if work is None:
            shape, chunk = (self._max_batch, layer.heads, width, device), self._config.chunk
            work = DecodeItems(*shape, chunk=chunk, window=layer.window, chunked=layer.chunked)
            self._works[reading] = work
        if batch.decodes and reading not in self._planned:
            work.plan(lengths[: batch.decodes])
            self._planned.add(reading)
        return work
