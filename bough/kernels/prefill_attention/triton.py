"""Prefill attention in Triton: tiles of scores that never leave the multiprocessor, after FlashAttention.

One program takes a block of queries of one row (see `query_blocks`) for PACK query heads of one kv head at once: the
tile of scores has a line for each pair of query and head. So short chunks over a long prefix still fill the tensor
cores, and fewer keys of a block's own diagonal are computed in vain. It first reads the row's prefix through the page
table, then the fresh keys up to its own queries. Blocks of keys that every query sees go without a mask, which is most
of them.

Short chunks of several rows that extend the same prefix fill a block together (see `blocks_together`): it reads what
they share once for all, then what each has of its own.

Scores are kept in units of log2, since exp2 is what the hardware has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from bough.kernels.decode_attention.work import oldest_seen
from bough.kernels.shared_memory import LITTLE, PLENTY, shared_bytes

IntArray = npt.NDArray[np.int32]
LOG2_E = 1.4426950408889634
IN_LOG2 = tl.constexpr(LOG2_E)  # for kernels
PROGRAMS = 132  # that keep a large GPU busy: with fewer, each would only wait for its own keys
# Of the keys that blocks of one row each read, at most: blocks of several rows mask more of theirs, and take more
# registers, so that of narrow heads half as many programs run at a time.
WORTH = 0.5


def query_blocks(query_lens: IntArray, block_m: int, context_lens: IntArray | None = None) -> IntArray:
    """[blocks, 2]: a row's place in the batch and the block's first query in that row; `block_m` queries each.

    The blocks with the most keys to read come first, so that the last to run are short. Context lengths, which may be
    bounds, serve that order only.
    """
    counts = -(-query_lens // block_m)
    place = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    first = (np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    keys = np.minimum(first + block_m, query_lens[place])
    if context_lens is not None:
        keys = keys + context_lens[place]
    order = np.argsort(-keys, kind="stable")
    return np.stack((place, first), axis=1).astype(np.int32)[order]


def blocks_together(
    query_lens: IntArray, context_lens: IntArray, common: IntArray, config: PrefillConfig
) -> IntArray | None:
    """[blocks, 4]: the place of a block's first row, its first query there, over how many rows it goes, and the first
    keys, whole blocks of them, that it reads once for all. Each row has `common` first keys on the pages of the one
    before it. None: reading row by row is as good."""
    size, step = config.block_queries, config.block_n
    starts = np.concatenate([[0], np.cumsum(query_lens)])

    def block(token: int, end: int) -> tuple[int, int, int, int, int]:
        """Of the tokens from `token` on, before `end`; behind the keys that it reads."""
        place, last = np.searchsorted(starts, [token, min(token + size, end) - 1], side="right").tolist()
        shared = min(context_lens[place - 1 : last].min(), common[place:last].min(initial=1 << 30)) // step * step
        own = -(-(context_lens[place - 1 : last] - shared) // step) * step
        first = token - int(starts[place - 1])
        return shared + int(own.sum()) + first + size, place - 1, first, last - place + 1, shared

    def keys(blocks: Iterable[tuple[int, int, int, int, int]]) -> int:
        return sum(read for read, *_ in blocks)

    alone, chosen = [], []
    for begin, end in pairwise([0, *(1 + np.flatnonzero(common[1:] < step)).tolist(), len(query_lens)]):
        bounds = starts[begin : end + 1].tolist()
        single = [block(token, after) for start, after in pairwise(bounds) for token in range(start, after, size)]
        alone += single
        chosen += min(single, [block(token, bounds[-1]) for token in range(bounds[0], bounds[-1], size)], key=keys)
    if keys(chosen) > WORTH * keys(alone):
        return None
    return np.array([fields for _, *fields in sorted(chosen, reverse=True)], dtype=np.int32)


def ends_of(blocks: IntArray, query_lens: IntArray, block_m: int) -> IntArray:
    """Those of the blocks that hold the last query of their row."""
    return blocks[blocks[:, 1] + block_m >= query_lens[blocks[:, 0]]]


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """What is tuned; results depend on it only by rounding."""

    block_m: int  # lines of the tile of scores: queries times packed heads
    block_n: int  # keys at a time
    pack: int  # query heads of one kv head that a program takes together; a power of two
    num_warps: int
    num_stages: int
    descriptors: bool = False  # fetch fresh keys and values by the copy engine

    @property
    def block_queries(self) -> int:
        """The `block_m` of `query_blocks`."""
        return self.block_m // self.pack


def config_for(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, room: int | None = None
) -> PrefillConfig:
    """Depends on the model and the device alone: whoever makes the blocks and whoever runs them get the same. `room` is
    the shared memory of a program, in bytes; this machine's when left out."""
    room = shared_bytes() if room is None else room
    group = heads // kv_heads
    pack = min(group & -group, 16)  # its largest power of two
    if dtype.itemsize > 2:  # no tensor cores: the products are unrolled, and larger tiles would spill
        lines, stages = (16, 1) if head_dim > 256 and room < PLENTY else (32, 2)
        return PrefillConfig(block_m=lines, block_n=16, pack=pack, num_warps=8, num_stages=stages)
    if head_dim > 256:
        return PrefillConfig(block_m=32, block_n=16 if room < PLENTY else 32, pack=pack, num_warps=8, num_stages=2)
    if head_dim > 128 and room < PLENTY:
        return PrefillConfig(block_m=64, block_n=32, pack=pack, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillConfig(block_m=128, block_n=64, pack=pack, num_warps=8, num_stages=2)
    stages = 2 if head_dim > 64 and room <= LITTLE else 3
    return PrefillConfig(block_m=128, block_n=64, pack=pack, num_warps=8, num_stages=stages, descriptors=True)


def prefill_attention(
    q: torch.Tensor,  # [tokens, heads, head_dim], rows back to back, the last dimension contiguous
    k: torch.Tensor,  # [tokens, kv_heads, head_dim], of the same tokens, each token's heads adjacent
    v: torch.Tensor,  # [tokens, kv_heads, head_dim]
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    query_starts: torch.Tensor,  # [batch + 1] int32
    context_lens: torch.Tensor,  # [batch] int32, tokens of the row in the cache
    # [blocks, 2] int32, of `query_blocks` with the config's block_queries; negative: none. Or [blocks, 4], of
    # `blocks_together`, without a window.
    blocks: torch.Tensor,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    chunked: bool = False,  # the window is one of those that stand side by side
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads] a logit without a value in each softmax
    k_scale: float = 1.0,  # what stored keys and values are multiplied with
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """[tokens, heads, head_dim] in q's type, accumulated in float32."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    chosen = config or config_for(heads, kv_heads, head_dim, q.dtype)
    assert q.stride(2) == 1
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    fields = blocks.shape[1]
    assert fields == 2 or not window
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    block_d = triton.next_power_of_2(head_dim)
    # A descriptor's tile is a power of two wide: of other heads it would fetch the neighbour's too.
    descriptors = chosen.descriptors and block_d == head_dim and _has_descriptors(q.device)
    unit = LOG2_E if softcap is None else 1 / softcap
    attend[(heads // chosen.pack, blocks.shape[0])](
        q, k, v, _describe(k, chosen.block_n) if descriptors else k, _describe(v, chosen.block_n) if descriptors else v,
        k_cache, v_cache, page_table, rows, query_starts, context_lens, blocks, sinks, out, q.stride(0),
        q.stride(1), k.stride(0), v.stride(0), page_table.stride(0), scale * unit, scale * k_scale * unit, v_scale,
        0.0 if softcap is None else softcap * LOG2_E,
        HAS_SOFTCAP=softcap is not None, WINDOW=window or 0, CHUNKED=chunked, HEADS=heads, KV_HEADS=kv_heads,
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, DESCRIPTORS=descriptors, PACK=chosen.pack, FIELDS=fields,
        BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, BLOCK_D=block_d,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip
    return out


@functools.cache
def _has_descriptors(device: torch.device) -> bool:
    """Whether a copy engine fetches tiles: NVIDIA's devices have one since Hopper. Triton's interpreter acts as if."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _describe(fresh: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Fresh keys or values as a matrix of tokens by heads times head_dim, fetched a head at a time."""
    tokens, kv_heads, head_dim = fresh.shape
    return TensorDescriptor(fresh, [tokens, kv_heads * head_dim], [fresh.stride(0), 1], [block_n, head_dim])


# The heads of a block are neighbours in the grid, so that those with the same keys run at the same time.
@triton.jit
def attend(
    q, k, v, k_desc, v_desc, k_cache, v_cache, page_table, rows, query_starts, context_lens, blocks, sinks, out,
    q_token_stride: int, q_head_stride: int, k_token_stride: int, v_token_stride: int, table_stride: int,
    fresh_scale: float, cached_scale: float, v_scale: float, softcap: float,
    HAS_SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PACK: tl.constexpr, FIELDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of queries, for PACK heads."""
    TOGETHER: tl.constexpr = FIELDS == 4  # of several rows, whose tokens stand back to back
    first_head = tl.program_id(0) * PACK
    block = tl.program_id(1)
    kv_head = first_head // (HEADS // KV_HEADS)
    place = tl.load(blocks + block * FIELDS)
    if place < 0:  # a captured grid has room for more blocks than most steps have
        return
    first = tl.load(blocks + block * FIELDS + 1)
    members = tl.load(blocks + block * FIELDS + 2) if TOGETHER else 1
    row_start = tl.load(query_starts + place)
    queries = tl.load(query_starts + place + members) - row_start
    context = tl.load(context_lens + place)
    pages = page_table + tl.load(rows + place).to(tl.int64) * table_stride

    line = tl.arange(0, BLOCK_M)
    query = first + line // PACK  # inside the row, or counted from its start
    head = first_head + line % PACK
    d = tl.arange(0, BLOCK_D)
    valid = (query < queries)[:, None] & (d < HEAD_DIM)[None, :]
    token = row_start.to(tl.int64) + query
    tile = tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=valid, other=0.0
    )

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if sinks is not None:  # as if a key of this score, without a value, had come first
        top = tl.load(sinks + head).to(tl.float32) * IN_LOG2
        norm += 1.0

    # The prefix: blocks that lie wholly inside it, then the rest. With a window every block is masked, and the first
    # is the one that holds the oldest key that the first query sees.
    oldest = context + query  # key that each line sees; only windows ask for it
    border = context // BLOCK_N * BLOCK_N
    if WINDOW:
        oldest = oldest_seen(context + query, WINDOW, CHUNKED)
        border = oldest_seen(context + first, WINDOW, CHUNKED) // BLOCK_N * BLOCK_N
    if TOGETHER:
        border = tl.load(blocks + block * FIELDS + 3)
    for masked in tl.static_range(1 if WINDOW else 0, 1 if TOGETHER else 2):
        acc, norm, top = _over_prefix(
            acc, norm, top, tile, oldest, k_cache, v_cache, pages, kv_head, border if masked else 0,
            context if masked else border, cached_scale, softcap, masked, HAS_SOFTCAP, WINDOW, KV_HEADS, HEAD_DIM,
            PAGE_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    if TOGETHER:
        # What each row has of its own. The lines of others see none of it: their oldest key lies behind all.
        oldest = tl.zeros([BLOCK_M], tl.int32)
        for member in range(members):
            start = tl.load(query_starts + place + member) - row_start
            after = tl.load(query_starts + place + member + 1) - row_start
            own = (query >= start) & (query < after)
            oldest = tl.where(own, context + start, oldest)  # in the end, of the fresh keys
            own_pages = page_table + tl.load(rows + place + member).to(tl.int64) * table_stride
            acc, norm, top = _over_prefix(
                acc, norm, top, tile, tl.where(own, 0, 1 << 30), k_cache, v_cache, own_pages, kv_head, border,
                tl.load(context_lens + place + member), cached_scale, softcap,
                True, HAS_SOFTCAP, True, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    acc *= v_scale

    # The fresh tokens: blocks that the first query sees whole, then the diagonal.
    k_row = k + row_start.to(tl.int64) * k_token_stride + kv_head * HEAD_DIM
    v_row = v + row_start.to(tl.int64) * v_token_stride + kv_head * HEAD_DIM
    end = tl.minimum(first + BLOCK_M // PACK, queries)
    border = (first + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        border = tl.maximum(0, oldest_seen(context + first, WINDOW, CHUNKED) - context) // BLOCK_N * BLOCK_N
    if TOGETHER:
        border = tl.where(members == 1, border, 0)
    for masked in tl.static_range(1 if WINDOW else 0, 2):
        acc, norm, top = _over_fresh(
            acc, norm, top, tile, query, oldest - context, k_row, v_row, k_desc, v_desc, row_start, kv_head,
            border if masked else 0, end if masked else border, queries, k_token_stride, v_token_stride, fresh_scale,
            softcap, masked, HAS_SOFTCAP, 1 if TOGETHER else WINDOW, HEAD_DIM, DESCRIPTORS and not masked, BLOCK_N,
            BLOCK_D,
        )  # fmt: skip

    result = (acc / norm[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * HEADS + head)[:, None] * HEAD_DIM + d[None, :], result, mask=valid)


@triton.jit
def _over_prefix(
    acc, norm, top, tile, oldest, k_cache, v_cache, pages, kv_head, begin, end, scale, softcap,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Folds in the keys begin..end of the cache."""
    d = tl.arange(0, BLOCK_D)
    offset = tl.arange(0, BLOCK_N)
    page = tl.load(pages + (begin + offset) // PAGE_SIZE, mask=begin + offset < end, other=0)
    for start in range(begin, end, BLOCK_N):
        key = start + offset
        held = key < end
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE  # a pool has more than 2^31 elements
        offsets = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        # One block ahead, in registers: keys and values can then be fetched as far ahead as the stages allow.
        page = tl.load(pages + (key + BLOCK_N) // PAGE_SIZE, mask=key + BLOCK_N < end, other=0)
        k = fetch(k_cache + offsets, held, MASKED, HEAD_DIM, BLOCK_D).to(tile.dtype)
        v = fetch(v_cache + offsets, held, MASKED, HEAD_DIM, BLOCK_D).to(tile.dtype)
        visible = held[None, :]
        if WINDOW:
            visible = visible & (key[None, :] >= oldest[:, None])
        acc, norm, top = _fold(acc, norm, top, tile, k, v, visible, scale, softcap, MASKED, HAS_SOFTCAP)
    return acc, norm, top


@triton.jit
def _over_fresh(
    acc, norm, top, tile, query, oldest, k_row, v_row, k_desc, v_desc, row_start, kv_head, begin, end, queries,
    k_token_stride, v_token_stride, scale, softcap,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Folds in the row's new tokens begin..end."""
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        held = key < queries
        if DESCRIPTORS:
            k = k_desc.load([row_start + start, kv_head * HEAD_DIM])
            v = v_desc.load([row_start + start, kv_head * HEAD_DIM])
        else:
            k = fetch(k_row + key[:, None] * k_token_stride + d[None, :], held, MASKED, HEAD_DIM, BLOCK_D)
            v = fetch(v_row + key[:, None] * v_token_stride + d[None, :], held, MASKED, HEAD_DIM, BLOCK_D)
        visible = query[:, None] >= key[None, :]
        if WINDOW:
            visible = visible & (key[None, :] >= oldest[:, None])
        acc, norm, top = _fold(acc, norm, top, tile, k, v, visible, scale, softcap, MASKED, HAS_SOFTCAP)
    return acc, norm, top


@triton.jit
def fetch(
    pointers: tl.tensor, held: tl.tensor, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """A tile [BLOCK_N, BLOCK_D]. What is not the row's is never read: another row's NaN would survive a weight of 0."""
    inside = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if MASKED and HEAD_DIM != BLOCK_D:
        return tl.load(pointers, mask=held[:, None] & inside, other=0.0)
    elif MASKED:  # noqa: RET505  (Triton wants each return in a branch of its own)
        return tl.load(pointers, mask=held[:, None], other=0.0)
    elif HEAD_DIM != BLOCK_D:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _fold(
    acc, norm, top, tile, k, v, visible, scale, softcap,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One block of keys of the running softmax: weighted values, sum of weights, and greatest score so far."""
    scores = tl.dot(tile, tl.trans(k), input_precision="ieee")
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores) - 1.0)  # softcap * tanh
        scale = 1.0
    if MASKED:
        # Not infinite: at the edge of a window a query may see no key of the block, and infinity minus infinity is
        # not a number.
        scores = tl.where(visible, scores, -1e30)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(scores * scale - new_top[:, None])
    if MASKED:
        # Where a query sees nothing, that difference is the rounding of huge numbers, and its power anything.
        weights = tl.where(visible, weights, 0.0)
    norm = norm * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, norm, new_top
