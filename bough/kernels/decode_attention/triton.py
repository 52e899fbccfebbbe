"""Decode attention in Triton: as fast as the keys and values can be read.

One program attends over one item (a range of a row's keys, see `work`) for all query heads of one kv head together, so
that each key is read once and the tensor cores have at least a few real rows. The grid depends on the batch alone, so
that the launch can be captured in a graph whatever the lengths.

Latents are one kv head for all query heads, and their first columns are the values: a program reads each once, for a
block of heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from bough.kernels.decode_attention.device import attend_over, hand_in, join_shared, join_sink, leave
from bough.kernels.decode_attention.shared import LINES, MIN_DOT, SharedWork, attend_shared
from bough.kernels.decode_attention.work import ITEM_FIELDS, DecodeWork, plan_decode
from bough.kernels.overlap import overlap, take_turn
from bough.kernels.shared_memory import LITTLE, PLENTY, shared_bytes

LOG2_E = 1.4426950408889634
WEIGHED_NUMBERS = 4096  # of parts that are weighed at a time; they are held in registers
WEIGHED_PARTS = 8  # at most, at a time: the code for each is written out


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """What is tuned; results depend on it only by rounding."""

    block_n: int  # keys at a time
    num_warps: int
    num_stages: int


def config_for(head_dim: int, group: int, kv_dtype: torch.dtype, *, room: int | None = None) -> DecodeConfig:
    """Tiles of about 16 KiB: several in flight and two or more programs fit in a multiprocessor's shared memory. `room`
    is what a program may have of that, in bytes; this machine's when left out."""
    room = shared_bytes() if room is None else room
    if kv_dtype.itemsize > 2:  # no tensor cores: the products are unrolled, and larger tiles would spill
        stages = 2 if head_dim > 128 and room <= LITTLE else 3
        if head_dim > 256 and room < PLENTY:
            stages = 1
        return DecodeConfig(block_n=MIN_DOT, num_warps=4, num_stages=stages)
    row_bytes = triton.next_power_of_2(head_dim) * kv_dtype.itemsize
    if kv_dtype.itemsize == 1 and group <= MIN_DOT:  # widened in registers: with larger tiles few programs have room
        return DecodeConfig(block_n=max(MIN_DOT, 4096 // row_bytes), num_warps=2, num_stages=3)
    block_n = min(128, max(MIN_DOT, 16384 // row_bytes))
    return DecodeConfig(block_n=block_n, num_warps=4, num_stages=3)


MOST_HEADS = 64  # that attend to latents in one program: as many lines as the widest instructions take
# A multiprocessor has room for two programs; reading keys takes long.
LATENT_WORK: dict[str, Any] = {"programs": 2 * 132, "key_step": 32}
FEW_ROWS = 32  # whose parts are weighed by several programs for each head


def head_blocks(heads: int) -> int:
    """In how many equal blocks the heads attend to latents; `DecodeWork` takes them for kv heads."""
    return next(blocks for blocks in range(-(-heads // MOST_HEADS), heads + 1) if heads % blocks == 0)


def latent_config_for(group: int, kv_dtype: torch.dtype, *, room: int | None = None) -> DecodeConfig:
    """As `config_for`, for latents of about 600 numbers and blocks of `group` heads."""
    room = shared_bytes() if room is None else room
    many, little = group > MOST_HEADS // 2, room < PLENTY
    if kv_dtype.itemsize > 2 or room <= LITTLE or (many and little):
        return DecodeConfig(block_n=MIN_DOT, num_warps=8, num_stages=2)
    return DecodeConfig(block_n=32, num_warps=8 if many else 4, num_stages=2 if many or little else 3)


def parts_at_once(group: int, head_dim: int) -> int:
    """How many parts of a row are read together when they are weighed."""
    numbers: int = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    return max(1, min(WEIGHED_PARTS, WEIGHED_NUMBERS // numbers))


def decode_attention(
    q: torch.Tensor,  # [batch, heads, head_dim], the last dimension contiguous
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]; of latents the first columns of k_cache
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
    k_scale: float = 1.0,  # what stored keys and values are multiplied with
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    shared: SharedWork | None = None,  # planned for these rows, and `work` for what it leaves of them
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """[batch, heads, head_dim of the values] in q's type, accumulated in float32."""
    batch, heads, head_dim = *q.shape[:2], v_cache.shape[2]
    extra = q.shape[2] - head_dim  # columns of latents that are keys alone
    kv_heads = head_blocks(heads) if extra else k_cache.shape[1]
    group = heads // kv_heads
    if work is None:
        settings = LATENT_WORK if extra else {}
        work = DecodeWork(batch, heads, kv_heads, head_dim, q.device, window=window, **settings)
        plan_decode(lengths, work)
    assert work.window == window, "the work was planned for another window"
    assert q.stride(2) == 1
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous() if not extra else v_cache.data_ptr() == k_cache.data_ptr()
    if out is None:
        out = torch.empty((batch, heads, head_dim), dtype=q.dtype, device=q.device)
    # Keys and values of fewer bits are widened to the queries' type before they are multiplied.
    wide = q.dtype if q.element_size() > 2 else k_cache.dtype
    chosen = config or (latent_config_for(group, wide) if extra else config_for(head_dim, group, wide))
    in_log2 = scale * k_scale * LOG2_E if softcap is None else scale * k_scale / softcap
    capped = None if softcap is None else softcap * LOG2_E
    others: tuple[torch.Tensor | None, ...] = (None, None, None)
    if shared is not None:
        assert window is None, "windows are read row by row"
        tile = latent_config_for(LINES, wide) if extra else config or config_for(head_dim, LINES, wide)
        attend_shared(
            q, k_cache, v_cache, page_table, rows, shared, kv_heads=kv_heads, page_size=page_size, scale=in_log2,
            softcap=capped, block_n=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        others = (shared.partial, shared.part_starts, shared.log_sums)
    _attend[(kv_heads, work.max_items(batch))](
        q, k_cache, v_cache, page_table, rows, work.items, work.first_item, sinks, out, work.partial,
        work.log_sums, work.arrivals, *others, batch, q.stride(0), q.stride(1), page_table.stride(0),
        in_log2, v_scale, capped or 0.0,
        HAS_SOFTCAP=softcap is not None, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, EXTRA=extra,
        PAGE_SIZE=page_size, FIELDS=ITEM_FIELDS, BLOCK_G=max(MIN_DOT, triton.next_power_of_2(group)),
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_E=max(MIN_DOT, triton.next_power_of_2(extra)),
        BLOCK_N=chosen.block_n, BLOCK_PARTS=parts_at_once(group, head_dim),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **overlap(batch),
    )  # fmt: skip
    if extra and work.cuts:
        weigh_parts(work, out)
    return out


def weigh_parts(work: DecodeWork, out: torch.Tensor) -> None:
    """Makes one result of the parts of each row that was cut. Parts of latents are so large that the last program to
    finish would take long with them."""
    batch, heads, head_dim = out.shape
    columns = min(triton.next_power_of_2(head_dim), 128 if batch <= FEW_ROWS else 512)
    _weigh_parts[(heads * triton.cdiv(head_dim, columns), batch)](
        work.first_item, work.partial, work.log_sums, out,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_C=columns, BLOCK_PARTS=WEIGHED_NUMBERS // columns,
        num_warps=4, **overlap(batch),
    )  # fmt: skip


# The kv heads of an item are neighbours in the grid: a token's heads are adjacent in memory, so their programs read
# the same pages at about the same time.
@triton.jit(do_not_specialize=["batch"])
def _attend(
    q, k_cache, v_cache, page_table, rows, items, first_item, sinks, out, partial, log_sums, arrivals,
    shared, shared_starts, shared_log_sums,
    batch: int, q_row_stride: int, q_head_stride: int, table_stride: int, scale: float, v_scale: float, softcap: float,
    HAS_SOFTCAP: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    EXTRA: tl.constexpr, PAGE_SIZE: tl.constexpr, FIELDS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One item for the query heads of one kv head."""
    take_turn(OVERLAP)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(first_item + batch):
        return
    place = tl.load(items + item * FIELDS)
    first = tl.load(items + item * FIELDS + 1)
    last = tl.load(items + item * FIELDS + 2)
    parts = tl.load(items + item * FIELDS + 3)
    pages = page_table + tl.load(rows + place).to(tl.int64) * table_stride

    member = tl.arange(0, BLOCK_G)
    head = kv_head * GROUP + member
    d = tl.arange(0, BLOCK_D)
    valid = (member < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_offsets = place.to(tl.int64) * q_row_stride + head[:, None] * q_head_stride + d[None, :]
    # Numbers of 8 bits become float16 in one instruction for two, bfloat16 in many.
    own: tl.constexpr = q.dtype.element_ty
    narrow: tl.constexpr = k_cache.dtype.element_ty.primitive_bitwidth == 8 and own.primitive_bitwidth == 16
    kind: tl.constexpr = tl.float16 if narrow else own
    queries = tl.load(q + q_offsets, mask=valid, other=0.0).to(kind)
    more_queries = queries
    if EXTRA:
        e = HEAD_DIM + tl.arange(0, BLOCK_E)
        more_offsets = place.to(tl.int64) * q_row_stride + head[:, None] * q_head_stride + e[None, :]
        more_valid = (member < GROUP)[:, None] & (e < HEAD_DIM + EXTRA)[None, :]
        more_queries = tl.load(q + more_offsets, mask=more_valid, other=0.0).to(kind)

    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if shared is not None:
        top, norm, acc = join_shared(
            shared, shared_log_sums, shared_starts, first_item, place, item, kv_head, top, norm, acc,
            KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
        )  # fmt: skip
    top, norm, acc = attend_over(
        queries, more_queries, k_cache, v_cache, pages, first, last, kv_head, top, norm, acc, scale, softcap,
        HAS_SOFTCAP, KV_HEADS, HEAD_DIM, EXTRA, PAGE_SIZE, BLOCK_D, BLOCK_E, BLOCK_N,
    )  # fmt: skip
    if sinks is not None:
        top, norm, acc = join_sink(sinks, first_item, place, item, kv_head, top, norm, acc, GROUP, BLOCK_G)
    if EXTRA:
        leave(
            acc * (v_scale / norm)[:, None], top + tl.log2(norm), place, item, parts, kv_head, out, partial, log_sums,
            KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
        )  # fmt: skip
    else:
        hand_in(
            acc * (v_scale / norm)[:, None], top + tl.log2(norm), place, item, parts, kv_head,
            out, partial, log_sums, arrivals, first_item,
            KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, BLOCK_PARTS,
        )  # fmt: skip


@triton.jit
def _weigh_parts(
    first_item, partial, log_sums, out,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some columns of one head of a row, if it was cut into parts."""
    take_turn(OVERLAP)
    place = tl.program_id(1)
    begin = tl.load(first_item + place)
    parts = tl.load(first_item + place + 1) - begin
    if parts <= 1:
        return
    blocks: tl.constexpr = (HEAD_DIM + BLOCK_C - 1) // BLOCK_C
    head = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    top, norm, acc = -float("inf"), 0.0, tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        line = (begin + part).to(tl.int64) * HEADS + head
        log_sum = tl.load(log_sums + line, mask=part < parts, other=float("-inf"))
        there = (part < parts)[:, None] & (column < HEAD_DIM)[None, :]
        value = tl.load(partial + line[:, None] * HEAD_DIM + column[None, :], mask=there, other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        shrink, weight = tl.exp2(top - new_top), tl.exp2(log_sum - new_top)
        norm, acc = norm * shrink + tl.sum(weight, 0), acc * shrink + tl.sum(value * weight[:, None], 0)
        top = new_top
    target = out + (place.to(tl.int64) * HEADS + head) * HEAD_DIM + column
    tl.store(target, (acc / norm).to(out.dtype.element_ty), mask=column < HEAD_DIM)
