"""Latent attention on GPUs of rows that compute several tokens, and of tokens whose queries read lists of slots.

Long chunks are computed in the expanded form: the latents that a row reads are gathered from their pages, the keys and
values of its heads are made of them, and these are attended to. How much is gathered and made at once is bounded: rows
are taken some at a time, and heads. Short chunks, and all of a captured step, whose lengths only the device knows, are
computed in the absorbed form. Owns what is worked out once a step for either.

Where attention is sparse, a list of slots was chosen for each token. To the kernels a list is a line of a page table
whose pages have one token, so a token of a prompt is a row like a decode. Layers that choose none share the lists
of the current step.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from bough.attention.base import IndexQueries, LatentSpec
from bough.attention.batch import AttentionBatch, ChunkPlaces
from bough.attention.reading import ToDevice
from bough.core.model_config import LatentConfig
from bough.kernels.invariant_attention.triton import ITEM_FIELDS, InvariantConfig, Partials, invariant_attention
from bough.kernels.latent_attention.triton import expanded_attention
from bough.kernels.lora.reference import Tokens
from bough.kernels.prefill_attention.triton import PrefillConfig, ends_of, query_blocks
from bough.kernels.sparse_index.triton import MAX_SCORES, choose_slots
from bough.memory.pools.kv_pool import KVPool, read_slots

MAX_GATHERED = 1 << 17  # latents at once, unless one row has more
MAX_EXPANDED = 1 << 28  # numbers of keys and values at once
ABSORBED_COST = 4  # of a product with latents in attention, in plain ones
GATHERED_COPIES = 2  # as they are stored, and widened


def scratch_bytes(latent: LatentConfig, context: int, itemsize: int) -> int:
    """The most memory that the rows of a step with cached prefixes take."""
    of_latent = latent.width * itemsize * GATHERED_COPIES + 3 * 8  # with its slot, and what that is worked out of
    return max(context, MAX_GATHERED) * of_latent + MAX_EXPANDED * itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a step, and what they read."""

    config: PrefillConfig
    slots: torch.Tensor | None  # [keys] of their latents; None: they read the step's own from `first` on
    owners: Tokens  # of the step, by whose adapters the keys and values of those are changed
    first: int
    key_starts: torch.Tensor  # [batch] int32, where each row's keys begin among those
    blocks: torch.Tensor  # [blocks, 2] int32, of `query_blocks`
    ends: torch.Tensor  # those of them with a row's last query


class LatentPrompts:
    """The rows of a step behind its decodes."""

    def __init__(self, to_device: ToDevice, config: PrefillConfig, absorbed: InvariantConfig) -> None:
        self._to_device, self._config, self._absorbed = to_device, config, absorbed
        self._short = replace(config, block_m=config.block_m // 2, num_warps=max(4, config.num_warps // 2))
        self._plans: dict[int, list[Part]] = {}  # by KV group
        self._items: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}  # by whether they are the ends alone

    @property
    def block_queries(self) -> int:
        """Of the blocks in `ChunkPlaces`."""
        return self._absorbed.block_queries

    def prepare(self) -> None:
        """Forgets the step before."""
        self._plans.clear()
        self._items.clear()

    def absorbs(self, batch: AttentionBatch, layer: LatentSpec) -> bool:
        """In which form the rows are computed."""
        if batch.chunks is not None:
            return True
        return not layer.worth_expanding(ABSORBED_COST * int(batch.query_lens[batch.decodes :].max()))

    def run_absorbed(
        self,
        queries: torch.Tensor,
        layer: LatentSpec,
        pool: KVPool,
        batch: AttentionBatch,
        chunks: ChunkPlaces,
        attended: torch.Tensor,
    ) -> None:
        """Writes what queries [tokens, heads, width] find in the latents to their places in `attended`."""
        if layer.ends_only not in self._items:
            blocks = chunks.ends if layer.ends_only else chunks.blocks
            self._items[layer.ends_only] = (_items_of(blocks), chunks.context_lens + chunks.query_starts.diff())
        items, lengths = self._items[layer.ends_only]
        nothing, plain, table = queries.new_empty(0), layer.absorbed, batch.page_tables[layer.group]
        own: dict[str, Any] = {"programs": len(items) - 1, "page_size": batch.page_size, "config": self._absorbed}
        own |= {"partials": Partials(nothing, nothing, nothing), "split_rows": 0, **plain.scores(pool)}  # none is split
        places = (*plain.caches(pool), table, batch.rows, chunks.query_starts, lengths, items)
        invariant_attention(queries, *places, out=attended, **own)

    def run_expanded(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        layer: LatentSpec,
        pool: KVPool,
        batch: AttentionBatch,
        chunks: ChunkPlaces,
        out: torch.Tensor,
    ) -> None:
        """Writes the results of these rows to their places in `out`."""
        if layer.group not in self._plans:
            self._plans[layer.group] = self._plan(batch, batch.page_tables[layer.group])
        rank = layer.latent.rank
        for part in self._plans[layer.group]:
            read = latents[part.first :]
            if part.slots is not None:
                read = read_slots(pool.keys[layer.layer], part.slots, pool.key_scales[layer.layer], q.dtype)[:, 0]
            for heads in layer.head_parts(len(read), MAX_EXPANDED):
                expanded_attention(
                    q[:, heads],
                    layer.expand(read, heads, part.owners),
                    read[:, rank:],
                    chunks.query_starts,
                    part.key_starts,
                    chunks.context_lens,
                    part.ends if layer.ends_only else part.blocks,
                    scale=layer.scale,
                    out=out[:, heads],
                    config=part.config,
                )

    def _plan(self, batch: AttentionBatch, table: torch.Tensor) -> list[Part]:
        first, rows = batch.decodes, len(batch.query_lens)
        if not batch.context_lens[first:].any():
            return [self._part(batch, first, rows, None)]
        parts, begin = [], first
        lengths = (batch.context_lens + batch.query_lens).astype(np.int64)
        for row in range(first, rows):
            if row + 1 == rows or int(lengths[begin : row + 2].sum()) > MAX_GATHERED:
                parts.append(self._part(batch, begin, row + 1, table))
                begin = row + 1
        return parts

    def _part(self, batch: AttentionBatch, begin: int, end: int, table: torch.Tensor | None) -> Part:
        """The rows begin..end; with a page table they read their whole sequences from there."""
        lengths = batch.query_lens if table is None else batch.context_lens + batch.query_lens
        starts = np.zeros(len(lengths), dtype=np.int32)
        starts[begin + 1 : end] = np.cumsum(lengths[begin : end - 1])
        config = self._config if batch.query_lens[begin:end].max() > self._short.block_m else self._short
        size = config.block_m
        blocks = query_blocks(batch.query_lens[begin:end], size, batch.context_lens[begin:end])
        blocks += np.array([begin, 0], dtype=np.int32)
        slots, first = None, int(batch.query_starts[begin])
        owners: Tokens = slice(first, None)
        if table is not None:
            held = lengths[begin:end]
            position = np.arange(int(held.sum()), dtype=np.int64) - np.repeat(starts[begin:end], held)
            own = np.repeat(np.arange(begin, end), held)
            places = self._to_device(np.stack((own, position, batch.query_starts[own])))
            page = table[batch.rows[places[0]].long(), places[1] // batch.page_size].long()
            slots, owners = page * batch.page_size + places[1] % batch.page_size, places[2]
        arrays = (starts, blocks, ends_of(blocks, batch.query_lens, size))
        return Part(config, slots, owners, first, *map(self._to_device, arrays))


def _items_of(blocks: torch.Tensor) -> torch.Tensor:
    """What `invariant_attention` takes, for blocks of which those without a row stand last. [1 + blocks, 3] int32"""
    items = torch.full((1 + len(blocks), ITEM_FIELDS), -1, dtype=torch.int32, device=blocks.device)
    items[1:, :2] = blocks
    items[0, 0] = (blocks[:, 0] >= 0).sum()
    return items


def lists_scratch_bytes(context: int) -> int:
    """What scores take where rows may be so long."""
    return max(MAX_SCORES, context) * 4


class Lists(NamedTuple):
    """What the tokens of a step read, as rows of a page table."""

    slots: torch.Tensor  # [tokens, top] int32
    lengths: torch.Tensor  # [tokens] int32
    places: torch.Tensor  # [tokens + 1] int32, counting up


class SparseLatents:
    """The lists of the current step."""

    def __init__(self) -> None:
        self._tokens: tuple[torch.Tensor, ...] | None = None
        self._slots: torch.Tensor | None = None

    def prepare(self) -> None:
        """Forgets the step before."""
        self._tokens = self._slots = None

    def choose(
        self,
        index: IndexQueries | None,
        layer: LatentSpec,
        pool: KVPool,
        batch: AttentionBatch,
        query_starts: torch.Tensor | None,
    ) -> Lists:
        """`query_starts` [batch + 1] stands on the device; without it all rows are decodes."""
        top = layer.top
        assert top is not None
        if self._tokens is None:
            lengths = (batch.positions + 1).int()
            places = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
            rows = batch.rows.int() if query_starts is None else _rows_of_tokens(batch, query_starts, places[:-1])
            self._tokens = rows, lengths, lengths.clamp(max=top), places
        rows, lengths, counts, places = self._tokens
        if index is not None:
            keys, table = pool.index_keys[layer.layer], batch.page_tables[layer.group]
            self._slots = choose_slots(*index, keys, table, rows, lengths, top, page_size=batch.page_size)
        assert self._slots is not None, "the first layer has no other whose choice it could share"
        return Lists(self._slots, counts, places)


def _rows_of_tokens(batch: AttentionBatch, query_starts: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The line of the page table that each token's row has. Padding behind the last row is given to any: its position
    is 0, which every row has."""
    ends = query_starts[1:].cummax(0).values  # padded with zeros
    return batch.rows[torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)].int()
