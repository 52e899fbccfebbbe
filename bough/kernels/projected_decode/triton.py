"""Decode attention from the projection in Triton: for few rows, where a step is a queue of short kernels.

As in `decode_attention`, a program attends over one item for the query heads of one kv head, which it first normalises
and rotates itself. The program of a row's last item does the same to the new key, stores it with its value, and counts
it in from registers, after those of the row's tokens before it in this step, which others store. So only the projection
comes from the kernel before this one; items, pages and the first cached keys are fetched while that kernel still runs
(see `overlap`), past the L1 cache, which may hold what an earlier step read.
"""

import torch
import triton
import triton.language as tl

from bough.kernels.decode_attention.device import absorb, hand_in, join_sink, scaled
from bough.kernels.decode_attention.shared import MIN_DOT
from bough.kernels.decode_attention.triton import LOG2_E, DecodeConfig, parts_at_once
from bough.kernels.decode_attention.work import ITEM_FIELDS, DecodeWork, plan_decode
from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.kernels.overlap import overlap, take_turn

# Beyond either, reading keys and values takes most of the time, and they cannot all be fetched ahead
# (`gpu_bench_projected_decode.py`).
MOST_ROWS = 16
MOST_KEYS = 8192  # of all rows together


def worth(rows: int, keys: int) -> bool:
    """Whether this kernel has been faster than turning the heads first, for so many rows with so many keys in all."""
    return rows <= MOST_ROWS and keys <= MOST_KEYS


def projects(dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether it takes these types at all: what tensor cores multiply, and stored as it is computed."""
    return dtype.itemsize == 2 and dtype == cache_dtype


def config_for(head_dim: int) -> DecodeConfig:
    """The whole of a short item at once, as far as registers allow."""
    wide = triton.next_power_of_2(head_dim)
    return DecodeConfig(block_n=max(MIN_DOT, min(128, 16384 // wide)), num_warps=4, num_stages=1)


def projected_decode(
    qkv: torch.Tensor,  # [batch, heads + 2 * kv_heads, head_dim], contiguous
    heads: int,
    kv_heads: int,
    qk_norm_rope: QKNormRope,  # of whole heads, contiguous
    positions: torch.Tensor,  # [batch] int64
    slots: torch.Tensor,  # [batch] int64
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim], contiguous, in qkv's type
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim], contiguous, in qkv's type
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    lengths: torch.Tensor,  # [batch] int32, keys the row's query sees, its own included
    work: DecodeWork | None,  # planned for these lengths; None: planned here, for this call alone
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads] a logit without a value in each softmax
    config: DecodeConfig | None = None,
    columns: int = 0,  # rows of a column, where a row has tokens at one position after the other; 0: each has one
    ahead: bool | None = None,  # whether the first keys are fetched before its turn; None: where launches overlap
) -> torch.Tensor:
    """[batch, heads, head_dim]: the queries, normalised and rotated, over the cached keys and the row's new one, which
    is stored. No row may see what another one stores, apart from columns before it; `qkv` stays as it is. At least one
    row has a key: the kernels behind this one rely on its having waited for those before it."""
    batch, _, head_dim = qkv.shape
    q_weight, k_weight, eps, plus_one, cos, sin = qk_norm_rope
    group = heads // kv_heads
    if work is None:
        work = DecodeWork(batch, heads, kv_heads, head_dim, qkv.device, window=window)
        plan_decode(lengths, work)
    assert work.window == window, "the work was planned for another window"
    assert qkv.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert qkv.dtype == k_cache.dtype == v_cache.dtype
    out = torch.empty((batch, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    chosen, early, width = config or config_for(head_dim), overlap(batch), batch // (columns or batch)
    _attend_projected[(kv_heads, work.max_items(batch))](
        qkv, q_weight, k_weight, eps, cos, sin, positions, slots, k_cache, v_cache, page_table, rows, lengths,
        work.items, work.first_item, sinks, out, work.partial, work.log_sums, work.arrivals, batch, columns or batch,
        page_table.stride(0),
        scale * LOG2_E if softcap is None else scale / softcap, 0.0 if softcap is None else softcap * LOG2_E,
        NEW=max(MIN_DOT, triton.next_power_of_2(width)) if width > 1 else 1,
        HAS_SOFTCAP=softcap is not None, PLUS_ONE=plus_one, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        PAGE_SIZE=page_size, FIELDS=ITEM_FIELDS, BLOCK_G=max(MIN_DOT, triton.next_power_of_2(group)),
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_N=chosen.block_n, BLOCK_PARTS=parts_at_once(group, head_dim),
        AHEAD=early["OVERLAP"] if ahead is None else ahead,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **early,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["batch", "columns"])
def _attend_projected(
    qkv, q_weight, k_weight, eps, cos, sin, positions, slots, k_cache, v_cache, page_table, rows, lengths, items,
    first_item, sinks, out, partial, log_sums, arrivals, batch, columns, table_stride, scale, softcap,
    NEW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PLUS_ONE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, FIELDS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_PARTS: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One item for the query heads of one kv head."""
    HALF: tl.constexpr = HEAD_DIM // 2
    kv_head, item = tl.program_id(0), tl.program_id(1)
    # The fields of items that are not there are read too, instead of waiting for their number: there is room for all.
    count = tl.load(first_item + batch, cache_modifier=".cg")
    place = tl.load(items + item * FIELDS, cache_modifier=".cg")
    first = tl.load(items + item * FIELDS + 1, cache_modifier=".cg")
    last = tl.load(items + item * FIELDS + 2, cache_modifier=".cg")
    parts = tl.load(items + item * FIELDS + 3, cache_modifier=".cg")
    if item >= count:
        return
    position = tl.load(positions + place, cache_modifier=".cg")
    new_slot = tl.load(slots + place, cache_modifier=".cg")
    pages = page_table + tl.load(rows + place, cache_modifier=".cg").to(tl.int64) * table_stride
    newest = tl.load(lengths + place, cache_modifier=".cg") - 1
    fresh, end = newest - place // columns, last  # the row's first token of this step
    last = tl.minimum(last, fresh)

    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    other_half = (d + HALF) % HEAD_DIM
    turn_cos = tl.load(cos + position * HALF + d % HALF, mask=inside, other=0.0)
    turn_sin = tl.load(sin + position * HALF + d % HALF, mask=inside, other=0.0)
    turn_sin = tl.where(d < HALF, -turn_sin, turn_sin)
    token = first + tl.arange(0, BLOCK_N)
    page = _page(pages, token, last, PAGE_SIZE)
    if AHEAD:
        k, v = _cached(k_cache, v_cache, page, token, last, kv_head, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_D)
        page = _page(pages, token + BLOCK_N, last, PAGE_SIZE)
    take_turn(OVERLAP)

    member = tl.arange(0, BLOCK_G)[:, None]
    heads_of_row = qkv + place.to(tl.int64) * ((KV_HEADS * (GROUP + 2)) * HEAD_DIM)
    own = heads_of_row + (kv_head * GROUP + member) * HEAD_DIM
    queries = _turned(
        own, (member < GROUP) & inside[None, :], d[None, :], other_half[None, :], q_weight, eps,
        turn_cos[None, :], turn_sin[None, :], PLUS_ONE, HEAD_DIM,
    )  # fmt: skip
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if end > fresh:
        key_head = heads_of_row + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
        kept = (new_slot * KV_HEADS + kv_head) * HEAD_DIM + d[None, :]
        if NEW > 1:
            place_of = fresh + tl.arange(0, NEW)
            present, back = (place_of >= first) & (place_of < end), newest - place_of[:, None]  # columns before this
            here = present[:, None] & inside[None, :]
            heads = key_head - back.to(tl.int64) * columns * ((KV_HEADS * (GROUP + 2)) * HEAD_DIM)
            angle = (position - back) * HALF + (d % HALF)[None, :]
            new_cos, new_sin = tl.load(cos + angle, mask=here, other=0.0), tl.load(sin + angle, mask=here, other=0.0)
            new_k = _turned(
                heads, here, d[None, :], other_half[None, :], k_weight, eps,
                new_cos, tl.where((d < HALF)[None, :], -new_sin, new_sin), PLUS_ONE, HEAD_DIM,
            )  # fmt: skip
            new_v = tl.load(heads + KV_HEADS * HEAD_DIM + d[None, :], mask=here, other=0.0)
            tl.store(k_cache + kept + 0 * back, new_k, mask=here & (back == 0))
            tl.store(v_cache + kept + 0 * back, new_v, mask=here & (back == 0))
            top, norm, acc = absorb(
                queries, new_k, new_v, present, top, norm, acc, scale, softcap, HAS_SOFTCAP
            )  # fmt: skip
        else:
            new_k = _turned(
                key_head, inside[None, :], d[None, :], other_half[None, :], k_weight, eps,
                turn_cos[None, :], turn_sin[None, :], PLUS_ONE, HEAD_DIM,
            )  # fmt: skip
            new_v = tl.load(key_head + KV_HEADS * HEAD_DIM + d[None, :], mask=inside[None, :], other=0.0)
            tl.store(k_cache + kept, new_k, mask=inside[None, :])
            tl.store(v_cache + kept, new_v, mask=inside[None, :])
            top = scaled(tl.sum(queries.to(tl.float32) * new_k.to(tl.float32), 1), scale, softcap, HAS_SOFTCAP)
            norm += 1.0
            acc += new_v.to(tl.float32)

    if AHEAD:
        top, norm, acc = absorb(queries, k, v, token < last, top, norm, acc, scale, softcap, HAS_SOFTCAP)
        first += BLOCK_N
    for start in range(first, last, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        here = page
        # One block ahead, in registers: with several stages, keys and values can then be fetched as far ahead.
        page = _page(pages, token + BLOCK_N, last, PAGE_SIZE)
        k, v = _cached(k_cache, v_cache, here, token, last, kv_head, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_D)
        top, norm, acc = absorb(queries, k, v, token < last, top, norm, acc, scale, softcap, HAS_SOFTCAP)

    if sinks is not None:
        top, norm, acc = join_sink(sinks, first_item, place, item, kv_head, top, norm, acc, GROUP, BLOCK_G)
    hand_in(
        acc / norm[:, None], top + tl.log2(norm), place, item, parts, kv_head,
        out, partial, log_sums, arrivals, first_item,
        KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, BLOCK_PARTS,
    )  # fmt: skip


@triton.jit
def _page(pages, token, last, PAGE_SIZE: tl.constexpr):
    """Where these tokens of the row lie, as far as they are before `last`."""
    return tl.load(pages + token // PAGE_SIZE, mask=token < last, other=0, cache_modifier=".cg")


@triton.jit
def _cached(
    k_cache, v_cache, page, token, last, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys and values of these tokens on these pages, as far as they are before `last`; zeros for others. What is not
    this row's must not be read: the pool is never cleared, and 0 * NaN is NaN."""
    d = tl.arange(0, BLOCK_D)
    slot = page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE
    offsets = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    held = (token < last)[:, None] & (d < HEAD_DIM)[None, :]
    k = tl.load(k_cache + offsets, mask=held, other=0.0, cache_modifier=".cg")
    v = tl.load(v_cache + offsets, mask=held, other=0.0, cache_modifier=".cg")
    return k, v


@triton.jit
def _turned(
    heads, here, d, other_half, weight, eps, turn_cos, turn_sin, PLUS_ONE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Heads, normalised if they have a weight, and rotated. Each number is rotated together with the one that stands at
    `other_half`; `turn_sin` is negative for those of the first half."""
    own = tl.load(heads + d, mask=here, other=0.0)
    paired = tl.load(heads + other_half, mask=here, other=0.0)
    a, b = own.to(tl.float32), paired.to(tl.float32)
    if weight is not None:
        scale_a = tl.load(weight + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        scale_b = tl.load(weight + other_half, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        if PLUS_ONE:
            scale_a += 1.0
            scale_b += 1.0
        inverse = tl.rsqrt(tl.sum(a * a, axis=1, keep_dims=True) / HEAD_DIM + eps)
        a = (a * inverse * scale_a).to(own.dtype).to(tl.float32)
        b = (b * inverse * scale_b).to(own.dtype).to(tl.float32)
    return (a * turn_cos + b * turn_sin).to(own.dtype)
