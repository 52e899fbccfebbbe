"""The default back end on CPUs: torch's scaled-dot-product attention over keys and values gathered from their pages.

Rows that compute one token are attended together, in padded groups of similar length; others run one by one, in blocks
of queries. A lone row whose slots stand side by side is read in place. It owns the reading plan of the current step,
the masks, and the scratch memory of gathers. It relies on exact host arrays, so its launches cannot be captured in a
graph.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from bough.attention.base import AttentionBackend, AttentionSpec, IndexQueries, LatentSpec
from bough.attention.batch import AttentionBatch
from bough.attention.reading import (
    MAX_GROUP_TOKENS,
    CausalMasks,
    DecodeRead,
    PrefillRead,
    Reads,
    TextsTogether,
    ToDevice,
    plan_reads,
    texts_together,
)
from bough.core.plan import IntArray
from bough.kernels.latent_attention.reference import absorb, expand, lift
from bough.kernels.sparse_index.reference import choose, hide_others, index_scores
from bough.memory.pools.kv_pool import KVPool

QUERY_BLOCK = 256  # queries of a prefill row attended at once: bounds the mask, and skips keys in the block's future
DISTANCE_BYTES = 9  # of a distance between query and key, and of whether it is hidden
MAX_SCORES = 1 << 26  # that exist at once where they are computed one by one, unless one query has more
MAX_EXPANDED = 1 << 26  # numbers of keys and values that are expanded from latents at once

# Of the groups of decodes, then of the other rows: the places of the chosen keys among those that are read, for each
# query [queries, top] int64. None: there are no more keys than a query attends to.
Choices = Sequence[torch.Tensor | None]


def scratch_bytes(context: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, writes_scores: bool) -> int:
    """The most memory that attention over contexts of this length takes for itself."""
    width = 1 << (context - 1).bit_length()
    gathered = 2 * (max(context, MAX_GROUP_TOKENS) * 5 // 4) * kv_heads * head_dim * itemsize
    # A mask for each of two windows, a cut of one, and the distances that one is made of.
    masks = QUERY_BLOCK * width * (3 * itemsize + DISTANCE_BYTES)
    if not writes_scores:
        return gathered + masks
    repeated = 2 * context * heads * head_dim * itemsize
    return gathered + masks + repeated + 3 * max(MAX_SCORES, heads * context) * 4


def leave_out_cudnn() -> None:
    """For this process: torch's attention is not cuDNN's, which torch prefers on Hopper and later.

    cuDNN builds and loads a kernel for every number of rows and keys that it has not seen, and decodes bring a new
    number of keys with every step: tens of milliseconds each, in which the launch may wait for all that is queued. The
    other kernels take any length.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


class TorchAttention(AttentionBackend):
    """Attention on any torch device. `together`: encoders attend texts of similar length at once, which on a GPU costs
    less than a launch for each. `packed`: or all at once, where a kernel for numbers of 16 bits knows their layer."""

    def __init__(self, to_device: ToDevice = torch.from_numpy, *, together: bool = False, packed: bool = False) -> None:
        self._to_device, self._together, self._packed = to_device, together, packed
        self._texts: list[TextsTogether] = []
        self._batch: AttentionBatch | None = None
        self._reads: dict[tuple[int, int | None, bool], Reads] = {}  # by group and window
        self._masks = CausalMasks(QUERY_BLOCK)
        self._scratch: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}  # by the shape of a token's keys
        self._choices: Choices = ()  # of the last layer that chose

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._reads.clear()
        if self._together:
            self._texts = list(texts_together(batch, self._to_device))
            self._bounds = self._to_device(batch.query_starts.astype(np.int32)), int(batch.query_lens.max())

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor:
        if self._together and not layer.causal:
            return self._encode(q, k, v, layer)
        dtype, q = q.dtype, q.to(pool.dtype)
        keys, values = pool.keys[layer.layer], pool.values[layer.layer]
        reads = self._plan(layer.group, layer.window, pool, layer.chunked)
        if reads.single_group is not None:
            return self._decode(q, reads.single_group, layer, keys, values).to(dtype)
        out = torch.empty_like(q)
        for group in reads.decodes:
            out[group.tokens] = self._decode(q[group.tokens], group, layer, keys, values)
        for row in reads.prefills:
            self._prefill(q, out, row, layer, *self._gather(row.index, keys, values))
        return out.to(dtype)

    def run_latent(
        self, q: torch.Tensor, latents: torch.Tensor, layer: LatentSpec, pool: KVPool, index: IndexQueries | None = None
    ) -> torch.Tensor:
        keys, values = pool.keys[layer.layer], pool.values[layer.layer]
        reads = self._plan(layer.group, None, pool)
        out = q.new_empty((len(q), layer.heads, layer.latent.value_dim))
        if index is not None:
            assert layer.top is not None
            self._choices = choose_tokens(index, reads, pool.index_keys[layer.layer], layer.top)
        choices = iter(repeat(None) if layer.top is None else self._choices)
        for group, chosen in zip(reads.decodes, choices, strict=False):
            if chosen is not None:
                seen = hide_others(chosen, group.keys, pool.dtype)
                group = replace(group, mask=seen[:, None, None])
            queries = absorb(asking := q[group.tokens], layer.weight, layer.latent.nope_dim)
            queries = layer.with_keys(queries, asking, group.tokens).to(pool.dtype)
            attended = self._decode(queries, group, layer.absorbed, keys, values).to(q.dtype)
            found = lift(attended, layer.weight, layer.latent.nope_dim)
            out[group.tokens] = layer.with_values(found, attended, group.tokens)
        for row, chosen in zip(reads.prefills, choices, strict=False):
            own, k, v = slice(row.first_token, row.last_token), *self._gather(row.index, keys, values)
            if not layer.worth_expanding(row.last_token - row.first_token):
                queries = absorb(q[own], layer.weight, layer.latent.nope_dim)
                queries = layer.with_keys(queries, q[own], own).to(pool.dtype)
                attended = queries.new_empty((*queries.shape[:2], layer.latent.rank))
                moved = replace(row, first_token=0, last_token=len(queries))
                self._prefill(queries, attended, moved, layer.absorbed, k, v, chosen)
                attended = attended.to(q.dtype)
                out[own] = layer.with_values(lift(attended, layer.weight, layer.latent.nope_dim), attended, own)
                continue
            read, owners = k[:, 0].to(q.dtype), torch.full((len(k),), row.first_token, device=k.device)
            for part in layer.head_parts(len(read), MAX_EXPANDED):
                expanded = expand(read, layer.expand(read, part, owners), layer.latent)
                plain = layer.expanded(part.stop - part.start)
                self._prefill(q[:, part], out[:, part], row, plain, *expanded, chosen)
        return out

    def _encode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec) -> torch.Tensor:
        """Whole texts, none of which has anything in the cache."""
        out, shared = torch.empty_like(q), layer.heads // layer.kv_heads
        usual = layer.window is None and layer.scale == layer.head_dim**-0.5 and not layer.writes_scores
        if self._packed and usual and shared == 1:
            from torch.nn.attention.varlen import varlen_attn  # a slow import

            bounds, longest = self._bounds
            return cast(torch.Tensor, varlen_attn(q, k, v, bounds, bounds, longest, longest))
        for texts in self._texts:
            rows, width = texts.places.shape
            mask = q.new_zeros(rows, 1, 1, width).masked_fill_(texts.padding[:, None, None], float("-inf"))
            if layer.window is not None:
                mask = mask + _near(0, width, width, layer.window, q)
            own, keys, values = (x[texts.places].transpose(1, 2) for x in (q, k, v))
            keys, values = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (keys, values))
            attended = attend(own, keys, values, mask, layer).transpose(1, 2)
            out.index_copy_(0, texts.tokens, attended.flatten(0, 1).index_select(0, texts.kept))
        return out

    def _plan(self, group: int, window: int | None, pool: KVPool, chunked: bool = False) -> Reads:
        """What the rows of this step read in layers of this group and window."""
        assert self._batch is not None, "prepare() comes before run()"
        reads = self._reads.get((group, window, chunked))
        if reads is None:
            reads = plan_reads(self._batch, group, window, pool.dtype, self._to_device, chunked)
            self._reads[group, window, chunked] = reads
        return reads

    def _decode(
        self, q: torch.Tensor, group: DecodeRead, layer: AttentionSpec, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """One query for each row of the group. [rows, heads, head_dim]

        The query heads that share a key head stand as that head's queries: its keys are then read once for all.
        """
        rows, shared = group.rows, layer.heads // layer.kv_heads
        k, v = self._gather(group.index, keys, values)
        out = attend(
            q.view(rows, layer.kv_heads, shared, layer.head_dim),
            k.view(rows, -1, *k.shape[1:]).transpose(1, 2),
            v.view(rows, -1, *v.shape[1:]).transpose(1, 2),
            group.mask,
            layer,
        )
        return out.reshape(rows, layer.heads, -1)

    def _prefill(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        row: PrefillRead,
        layer: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> None:
        """Several queries of one row over all keys that it reads, or over those `chosen` for each, block by block,
        written to their place in `out`."""
        k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, kv_heads, keys, head_dim]
        most = max(1, MAX_SCORES // (layer.heads * k.shape[2]))
        size = min(QUERY_BLOCK, most) if layer.writes_scores else QUERY_BLOCK
        window, ahead = None if layer.chunked else layer.window, k.shape[2] - row.last_token
        blocks = _query_blocks(row, ahead, size, layer.window if layer.chunked else None)
        for first, last in blocks[-1:] if layer.ends_only else blocks:
            end = last + ahead  # the block's last query sees the keys before `end`
            begin = 0 if window is None else max(0, first + ahead - window + 1)
            if layer.chunked and layer.window is not None:
                begin = (end - 1) // layer.window * layer.window
            mask: torch.Tensor | None = self._masks.cut(last - first, end - begin, window, k)
            if chosen is not None:
                mask = hide_others(chosen[first - row.first_token : last - row.first_token], end, k.dtype)
            if not layer.causal:
                begin, end = 0, k.shape[2]
                mask = None if layer.window is None else _near(first + ahead, last + ahead, end, layer.window, k)
            assert self._batch is not None
            if self._batch.both_ways is not None and not layer.one_way:
                mask, end = _ahead(mask, self._batch.both_ways, (first, last), begin, end, ahead)
            block = q[first:last].transpose(0, 1)[None]  # [1, heads, queries, head_dim]
            attended = attend(block, k[:, :, begin:end], v[:, :, begin:end], mask, layer)
            out[first:last] = attended[0].transpose(0, 1)

    def _gather(
        self, index: slice | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the slots, in order: a view where they adjoin, else a copy until the next call."""
        if isinstance(index, slice):
            return keys[index], values[index]
        size = index.shape[0]
        shared = values.data_ptr() == keys.data_ptr()  # latents
        shape = keys.shape[1:]
        if shape not in self._scratch or self._scratch[shape][0].shape[0] < size:
            self._scratch.pop(shape, None)  # first, so that old and new need not fit in memory together
            room = (max(size, 1024) * 5 // 4, *shape)  # lengths grow by one a step: some for the next ones
            self._scratch[shape] = (keys.new_empty(room), values.new_empty((0,) if shared else room))
        k = self._scratch[shape][0][:size]
        torch.index_select(keys, 0, index, out=k)
        if shared:
            return k, k[..., : values.shape[-1]]
        v = self._scratch[shape][1][:size]
        torch.index_select(values, 0, index, out=v)
        return k, v


def choose_tokens(index: IndexQueries, reads: Reads, cache: torch.Tensor, top: int) -> Choices:
    """By the index keys in `cache` [slots, head_dim]."""
    decodes = [_choose_for_decodes(index, group, cache[group.index], top) for group in reads.decodes]
    return decodes + [_choose_for_row(index, row, cache[row.index], top) for row in reads.prefills]


def _choose_for_decodes(index: IndexQueries, group: DecodeRead, keys: torch.Tensor, top: int) -> torch.Tensor | None:
    keys = keys.view(group.rows, -1, keys.shape[-1])
    if keys.shape[1] <= top:
        return None
    scores = index_scores(index.q[group.tokens, None], index.weights[group.tokens, None], keys)[:, 0]
    if group.mask is not None:
        scores += group.mask[:, 0, 0]
    return choose(scores, top)


def _choose_for_row(index: IndexQueries, row: PrefillRead, keys: torch.Tensor, top: int) -> torch.Tensor | None:
    if len(keys) <= top:
        return None
    place, chosen = torch.arange(len(keys), device=keys.device), []
    size = max(1, MAX_SCORES // (index.q.shape[1] * len(keys)))
    for first in range(row.first_token, row.last_token, size):
        part = slice(first, min(first + size, row.last_token))
        scores = index_scores(*index.cut(part), keys)
        own = place[part.start - row.last_token :][: len(scores), None]
        chosen.append(choose(scores.masked_fill_(place > own, float("-inf")), top))
    return torch.cat(chosen)


def _ahead(
    mask: torch.Tensor | None, runs: IntArray, block: tuple[int, int], begin: int, end: int, ahead: int
) -> tuple[torch.Tensor | None, int]:
    """The mask of a block, and the key that its queries end before, where tokens of these runs see those behind them
    in the run. Keys before `begin` are not read; a token's own key is `ahead` of it."""
    first, last = block
    met = [(start, start + count) for start, count in runs.tolist() if start < last and first < start + count]
    if mask is None or not met:
        return mask, end
    widest = max(end, *(stop + ahead for _, stop in met))
    mask = F.pad(mask, (0, widest - end), value=float("-inf")).clone()
    for start, stop in met:
        low, high, left = max(start, first), min(stop, last), max(start + ahead, begin)
        queries = torch.arange(low + ahead, high + ahead, device=mask.device)[:, None]
        keys = torch.arange(left, stop + ahead, device=mask.device)
        mask[low - first : high - first, left - begin : stop + ahead - begin].masked_fill_(keys > queries, 0.0)
    return mask, widest


def _near(first: int, last: int, keys: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """The mask of an encoder's queries from `first` to `last` that see fewer than `window` keys to each side."""
    distance = torch.arange(first, last, device=like.device)[:, None] - torch.arange(keys, device=like.device)
    return like.new_zeros(distance.shape).masked_fill_(distance.abs() >= window, float("-inf"))


def _query_blocks(row: PrefillRead, ahead: int, size: int, chunk: int | None) -> list[tuple[int, int]]:
    """The row's tokens in blocks of up to `size`, none of which is in two chunks. A token's own key is `ahead` of it,
    counted from the beginning of a chunk."""
    blocks, first = [], row.first_token
    while first < row.last_token:
        last = min(first + size, row.last_token)
        if chunk is not None:
            last = min(last, ((first + ahead) // chunk + 1) * chunk - ahead)
        blocks.append((first, last))
        first = last
    return blocks


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, layer: AttentionSpec
) -> torch.Tensor:
    """softmax(q k) v for [batch, heads, tokens, head_dim]; k and v may have fewer heads, each for several of q's."""
    shared = q.shape[1] // k.shape[1]
    if layer.writes_scores:
        return _attend_by_scores(q, k, v, mask, layer)
    if shared > 1 and q.device.type != "cpu":
        return _attend_by_kv_head(q, k, v, mask, layer)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=shared > 1)


def _attend_by_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, layer: AttentionSpec
) -> torch.Tensor:
    """The same for scores that are capped, or that share the softmax with a sink."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is not None:
        scores = scores + mask
    if layer.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        # Of decodes the heads that share a key head stand as its queries; of prompts each head stands by itself.
        sinks = layer.sinks.float().view(1, q.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(v.dtype), v)


def _attend_by_kv_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, layer: AttentionSpec
) -> torch.Tensor:
    """The same for one row whose key heads serve several query heads each: they become the batch.

    On GPUs no kernel takes a mask and fewer key heads than query heads; torch would write out all scores and repeat the
    keys. So each key head is a batch of its own, which its query heads read through a stride of zero.
    """
    heads = k.shape[1]
    shared = q.shape[1] // heads
    queries = q[0].reshape(heads, shared, *q.shape[2:])
    keys, values = (x[0][:, None].expand(-1, shared, -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
    return out.flatten(0, 1)[None]
