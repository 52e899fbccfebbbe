"""The default back end on GPUs: Triton kernels over the paged pool, the same code for NVIDIA and AMD.

Decoding rows go through a kernel that splits the keys of each row over the device by a plan made there, so that a
captured graph fits any lengths; a step of few such rows with few keys has a kernel that begins with the projection.
Rows that compute more go through one that reads their cached prefix from pages and their new tokens directly. Owns the
decode plan and its scratch memory, one for each window and shape of heads that the layers have.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bough.attention.base import AttentionBackend, AttentionSpec, IndexQueries, LatentSpec, Reading
from bough.attention.batch import AttentionBatch, ChunkPlaces
from bough.attention.latent_prompts import LatentPrompts, SparseLatents
from bough.core.plan import IntArray
from bough.kernels.decode_attention.shared import SharedWork
from bough.kernels.decode_attention.triton import decode_attention
from bough.kernels.decode_attention.work import DecodeWork, WholeRows, plan_decode
from bough.kernels.latent_attention.triton import absorb, lift
from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.kernels.prefill_attention.triton import (
    PROGRAMS,
    PrefillConfig,
    blocks_together,
    ends_of,
    prefill_attention,
    query_blocks,
)
from bough.kernels.projected_decode.triton import projected_decode, projects
from bough.memory.pools.kv_pool import KVPool

MOST_ABSORBED = 1024  # tokens whose queries are multiplied with the keys' matrices at once


class TritonAttention(AttentionBackend):
    """Attention on a GPU. `to_device` takes small arrays there, `make_work` makes the decode plan of layers like one;
    `latents` is for models with latent attention."""

    def __init__(
        self,
        to_device: Callable[[npt.NDArray[Any]], torch.Tensor],
        make_work: Callable[[AttentionSpec], DecodeWork],
        prefill: PrefillConfig,
        latents: LatentPrompts | None = None,
    ) -> None:
        self._latents = latents
        self._block_queries = prefill.block_queries if latents is None else latents.block_queries
        self._to_device = to_device
        self._make_work = make_work
        self._prefill = prefill
        self._works: dict[Reading, DecodeWork] = {}
        self._planned: set[Reading] = set()
        self._batch: AttentionBatch | None = None
        self._chunks: ChunkPlaces | None = None
        self._sparse = SparseLatents()
        self._whole: list[tuple[slice, DecodeWork]] = []  # parts of a sparse step's tokens

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._planned.clear()
        self._sparse.prepare()
        self._whole.clear()
        if self._latents is not None:
            self._latents.prepare()
        self._chunks = batch.chunks
        if self._chunks is None and len(batch.query_lens) > batch.decodes:
            self._chunks = self._lay_out_chunks(batch)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor:
        batch, chunks = self._batch, self._chunks
        assert batch is not None, "prepare() comes before run()"
        out = torch.empty((q.shape[0], layer.heads, layer.head_dim), dtype=q.dtype, device=q.device)
        n = batch.decodes
        if n:
            self._decode(q[:n], layer, pool, batch, out[:n])
        if chunks is not None:
            blocks, together = chunks.ends if layer.ends_only else chunks.blocks, chunks.together
            if together is not None and _reads_first(layer) and not layer.ends_only:
                programs = len(together) * layer.heads // self._prefill.pack
                blocks = together if programs >= PROGRAMS else blocks
            places = (batch.page_tables[layer.group], batch.rows, chunks.query_starts, chunks.context_lens, blocks)
            own = {"page_size": batch.page_size, "chunked": layer.chunked, "config": self._prefill}
            prefill_attention(q, k, v, *(*layer.caches(pool), *places), out=out, **(layer.scores(pool) | own))
        return out

    def _decode(
        self,
        q: torch.Tensor,
        layer: AttentionSpec,
        pool: KVPool,
        batch: AttentionBatch,
        out: torch.Tensor,
        most: int | None = None,
    ) -> None:
        """Writes what the step's decodes find to `out`; of each `most` keys are planned for."""
        n, shared, settings = batch.decodes, _shared(batch, layer), layer.scores(pool)
        rows = (batch.page_tables[layer.group], batch.rows[:n], batch.lengths[:n])
        given, work = (q, *layer.caches(pool), *rows), self._plan(batch, layer, most)
        decode_attention(*given, work, page_size=batch.page_size, out=out, shared=shared, **settings)

    def run_latent(
        self, q: torch.Tensor, latents: torch.Tensor, layer: LatentSpec, pool: KVPool, index: IndexQueries | None = None
    ) -> torch.Tensor:
        batch, chunks, nope_dim = self._batch, self._chunks, layer.latent.nope_dim
        assert batch is not None, "prepare() comes before run_latent()"
        out = torch.empty((len(q), layer.heads, layer.latent.value_dim), dtype=q.dtype, device=q.device)
        n = batch.decodes
        if layer.top is not None and not _sees_all(batch, layer.top):
            self._run_sparse(q, layer, pool, batch, index, out)
            return out
        short = chunks if chunks is not None and self._prompts.absorbs(batch, layer) else None
        if n or short is not None:
            own = slice(n) if short is None else slice(None)
            queries = layer.with_keys(absorb(q[own], layer.weight, nope_dim), q[own], own)
            attended = torch.empty((*queries.shape[:2], layer.latent.rank), dtype=q.dtype, device=q.device)
            if n:
                self._decode(queries[:n], layer.absorbed, pool, batch, attended[:n], layer.top)
            if short is not None:
                self._prompts.run_absorbed(queries, layer, pool, batch, short, attended)
            layer.with_values(lift(attended, layer.weight, nope_dim, out=out[own]), attended, own)
        if chunks is not None and short is None:
            self._prompts.run_expanded(q, latents, layer, pool, batch, chunks, out)
        return out

    def _run_sparse(
        self,
        q: torch.Tensor,
        layer: LatentSpec,
        pool: KVPool,
        batch: AttentionBatch,
        index: IndexQueries | None,
        out: torch.Tensor,
    ) -> None:
        """All rows in the absorbed form, each token by its list. Beside prompts, decodes are not cut into items."""
        starts, nope_dim = None if self._chunks is None else self._chunks.query_starts, layer.latent.nope_dim
        lists, plain = self._sparse.choose(index, layer, pool, batch, starts), layer.absorbed
        if starts is None:
            parts = [(slice(len(q)), self._plan(batch, plain, layer.top))]
        else:
            if not self._whole:
                sizes = [slice(at, min(at + MOST_ABSORBED, len(q))) for at in range(0, len(q), MOST_ABSORBED)]
                self._whole = [(part, WholeRows(lists.lengths[part])) for part in sizes]
            parts = self._whole
        for part, work in parts:
            queries, settings = absorb(q[part], layer.weight, nope_dim), plain.scores(pool)
            queries = layer.with_keys(queries, q[part], part)
            given = (queries, *plain.caches(pool), lists.slots[part], lists.places, lists.lengths[part])
            attended = decode_attention(*given, work, page_size=1, **settings)
            layer.with_values(lift(attended, layer.weight, nope_dim, out=out[part]), attended, part)

    @property
    def _prompts(self) -> LatentPrompts:
        assert self._latents is not None, "the back end was made for another kind of model"
        return self._latents

    def run_projected(
        self, qkv: torch.Tensor, qk_norm_rope: QKNormRope, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor | None:
        batch = self._batch
        assert batch is not None, "prepare() comes before run_projected()"
        if not batch.few_keys or not projects(qkv.dtype, pool.dtype):
            return None
        assert batch.decodes == len(qkv), "only decodes alone have few keys"
        places = (batch.positions, batch.slots[layer.group], *layer.caches(pool), batch.page_tables[layer.group])
        rows = (batch.rows, batch.lengths, self._plan(batch, layer))
        shape, sinks = (layer.heads, layer.kv_heads, qk_norm_rope), layer.sinks
        settings: dict[str, Any] = {"scale": layer.scale, "window": layer.window, "softcap": layer.softcap}
        settings["columns"] = batch.columns
        return projected_decode(qkv, *shape, *places, *rows, page_size=batch.page_size, sinks=sinks, **settings)

    def _plan(self, batch: AttentionBatch, layer: AttentionSpec, most: int | None = None) -> DecodeWork:
        """How the keys of this step's decodes, or `most` of each, are split; made by the first layer that reads so."""
        reading = layer.reading
        work = self._works.get(reading)
        if work is None:
            work = self._works[reading] = self._make_work(layer)
        if reading not in self._planned:
            lengths, shared = batch.lengths[: batch.decodes], _shared(batch, layer)
            own_first = None if shared is None else shared.own_first
            plan_decode(lengths if most is None else lengths.clamp(max=most), work, own_first)
            self._planned.add(reading)
        return work

    def _lay_out_chunks(self, batch: AttentionBatch) -> ChunkPlaces:
        n, common, together = batch.decodes, batch.common, None
        blocks, ends = chunk_blocks(batch.query_lens, batch.context_lens, n, self._block_queries)
        if common is not None and common[n:].any() and self._latents is None:
            together = blocks_together(batch.query_lens[n:], batch.context_lens[n:], common[n:], self._prefill)
        return ChunkPlaces(
            together=None if together is None else self._to_device(together + np.array([n, 0, 0, 0], dtype=np.int32)),
            query_starts=self._to_device(batch.query_starts),
            context_lens=self._to_device(batch.context_lens),
            blocks=self._to_device(blocks),
            ends=self._to_device(ends),
        )


def _reads_first(layer: AttentionSpec) -> bool:
    """Whether the layer reads a row's first keys: nothing is shared through a window, which each has elsewhere."""
    return layer.window is None and layer.group == 0


def _shared(batch: AttentionBatch, layer: AttentionSpec) -> SharedWork | None:
    """What this layer's decodes read together."""
    return batch.shared if _reads_first(layer) else None


def _sees_all(batch: AttentionBatch, top: int) -> bool:
    """Whether the host knows, of a step with prompts, that no row has more than `top` tokens: nothing is chosen then,
    and long chunks are computed in the expanded form."""
    with_prompts = len(batch.query_lens) > batch.decodes
    return with_prompts and int((batch.context_lens + batch.query_lens).max()) <= top


def chunk_blocks(
    query_lens: IntArray, context_lens: IntArray, decodes: int, block_queries: int
) -> tuple[IntArray, IntArray]:
    """The blocks of the rows behind the decodes, with the rows' places in the whole batch, and those among them that
    hold a row's last query. [blocks, 2] each"""
    blocks = query_blocks(query_lens[decodes:], block_queries, context_lens[decodes:])
    blocks += np.array([decodes, 0], dtype=np.int32)
    return blocks, ends_of(blocks, query_lens, block_queries)
