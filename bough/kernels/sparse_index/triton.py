"""The index of sparse attention in Triton: the store of index keys, and the choice of the slots that a query reads.

Lengths are the device's: grids depend on the number of tokens alone, so that all of it can be captured in a graph. What
is chosen for a token depends on nothing but its query and its keys, to the bit.
"""

import torch
import triton
import triton.language as tl

from bough.kernels.latent_attention.triton import HEADS_AT_ONCE, MIN_DOT
from bough.kernels.norm_rope_store.triton import turn
from bough.kernels.overlap import overlap, take_turn

MAX_SCORES = 1 << 26  # that exist at once, unless one row has more
BLOCK_KEYS = 64  # scored at a time
BLOCK_SCORES = 2048  # looked at at a time
PROGRAMS = 4 * 132  # enough to fill a large GPU


def index_store_(
    q: torch.Tensor,  # [tokens, heads, head_dim], the last two dimensions contiguous
    k: torch.Tensor,  # [tokens, head_dim], the last dimension contiguous
    weight: torch.Tensor,  # [head_dim]
    bias: torch.Tensor,  # [head_dim]
    eps: float,
    cos: torch.Tensor,  # [context, rope_dim / 2] float32, contiguous
    sin: torch.Tensor,  # [context, rope_dim / 2] float32, contiguous
    positions: torch.Tensor,  # [tokens] int64
    slots: torch.Tensor,  # [tokens] int64
    cache: torch.Tensor,  # [slots, head_dim], contiguous
) -> None:
    """Rotates the beginning of each query head in place; stores the layer norm of each key, rotated like these."""
    tokens, heads, head_dim = q.shape
    if tokens == 0:
        return
    half = cos.shape[1]
    _store[(tokens, 1 + triton.cdiv(heads, HEADS_AT_ONCE))](
        q, k, weight, bias, eps, cos, sin, positions, slots, cache, q.stride(0), k.stride(0),
        HEADS=heads, HEAD_DIM=head_dim, HALF=half, BLOCK_H=HEADS_AT_ONCE, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK=triton.next_power_of_2(half),
        num_warps=4, **overlap(tokens),
    )  # fmt: skip


@triton.jit
def _store(
    q, k, weight, bias, eps, cos, sin, positions, slots, cache, q_stride, k_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The first program of a token has its key, the others have some of its query heads."""
    take_turn(OVERLAP)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)[None, :]
    position = tl.load(positions + token)
    turn_cos = tl.load(cos + position * HALF + column, mask=column < HALF, other=0.0)
    turn_sin = tl.load(sin + position * HALF + column, mask=column < HALF, other=0.0)
    if block > 0:
        head = (block - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        heads = q + token * q_stride + head * HEAD_DIM + column
        turn(heads, (head < HEADS) & (column < HALF), column, None, 0.0, turn_cos, turn_sin, False, HALF)
    else:
        line, kept = k + token * k_stride, cache + tl.load(slots + token) * HEAD_DIM
        d = tl.arange(0, BLOCK_D)[None, :]
        wide = tl.load(line + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        mean = tl.sum(wide, axis=1, keep_dims=True) / HEAD_DIM
        centred = tl.where(d < HEAD_DIM, wide - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / HEAD_DIM + eps)
        still = _normed(line, weight, bias, d, d < HEAD_DIM, mean, scale)
        a = _normed(line, weight, bias, column, column < HALF, mean, scale)
        b = _normed(line, weight, bias, HALF + column, column < HALF, mean, scale)
        first = (a * turn_cos - b * turn_sin).to(k.dtype.element_ty)
        second = (b * turn_cos + a * turn_sin).to(k.dtype.element_ty)
        tl.store(kept + d, still.to(cache.dtype.element_ty), mask=(d >= 2 * HALF) & (d < HEAD_DIM))
        tl.store(kept + column, first.to(cache.dtype.element_ty), mask=column < HALF)
        tl.store(kept + HALF + column, second.to(cache.dtype.element_ty), mask=column < HALF)


@triton.jit
def _normed(line, weight, bias, d, here, mean, scale):
    """The columns `d` of a line's layer norm, as its type has them. float32"""
    values = tl.load(line + d, mask=here, other=0.0)
    gain = tl.load(weight + d, mask=here, other=0.0).to(tl.float32)
    shift = tl.load(bias + d, mask=here, other=0.0).to(tl.float32)
    return ((values.to(tl.float32) - mean) * scale * gain + shift).to(values.dtype).to(tl.float32)


def choose_slots(
    q: torch.Tensor,  # [tokens, heads, head_dim], the last two dimensions contiguous
    weights: torch.Tensor,  # [tokens, heads], the last dimension contiguous
    cache: torch.Tensor,  # [slots, head_dim], contiguous
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [tokens] int32, lines of page_table
    lengths: torch.Tensor,  # [tokens] int32, keys that the token's query could see, its own included
    top: int,
    *,
    page_size: int,
) -> torch.Tensor:
    """The slots of the best keys of each query, in the order of their tokens; of equal ones the first are taken. Where
    there are no more than `top` keys, all their slots, and behind them anything. [tokens, top] int32"""
    tokens, heads, head_dim = q.shape
    longest = page_table.shape[1] * page_size
    assert q.stride(2) == weights.stride(1) == 1
    assert q.stride(1) == head_dim
    chosen = torch.empty((tokens, top), dtype=torch.int32, device=q.device)
    size = max(1, MAX_SCORES // longest)
    for first in range(0, tokens, size):
        part = slice(first, min(first + size, tokens))
        count = part.stop - first
        reading = (page_table, rows[part], lengths[part])
        scores = torch.empty((count, longest), dtype=torch.float32, device=q.device)
        splits = min(triton.cdiv(PROGRAMS, count), triton.cdiv(longest, BLOCK_KEYS))
        _score[(count, splits)](
            q[part], weights[part], cache, *reading, scores, q.stride(0), weights.stride(0), page_table.stride(0),
            longest,
            TOP=top, HEADS=heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
            BLOCK_H=max(MIN_DOT, triton.next_power_of_2(heads)), BLOCK_N=BLOCK_KEYS,
            BLOCK_D=max(MIN_DOT, triton.next_power_of_2(head_dim)),
            num_warps=4, num_stages=3,
        )  # fmt: skip
        _choose[(count,)](
            scores, *reading, chosen[part], page_table.stride(0), longest,
            TOP=top, PAGE_SIZE=page_size, BLOCK=BLOCK_SCORES,
            num_warps=8,
        )  # fmt: skip
    return chosen


# What differs from step to step is not specialised on: all steps run the same code.
@triton.jit(do_not_specialize_on_alignment=["q", "weights", "rows", "lengths", "scores"])
def _score(
    q, weights, cache, page_table, rows, lengths, scores,
    q_stride: int, weight_stride: int, table_stride: int, score_stride: int,
    TOP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Blocks of one query's keys, by turns with the other programs of the query. Where all are read, none is scored."""
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + token)
    if length <= TOP:
        return
    pages = page_table + tl.load(rows + token).to(tl.int64) * table_stride
    head, d, offset = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    here = (head < HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    tile = tl.load(q + token * q_stride + head[:, None] * HEAD_DIM + d[None, :], mask=here, other=0.0)
    weight = tl.load(weights + token * weight_stride + head, mask=head < HEADS, other=0.0).to(tl.float32)
    for start in range(tl.program_id(1) * BLOCK_N, length, tl.num_programs(1) * BLOCK_N):
        key = start + offset
        page = tl.load(pages + key // PAGE_SIZE, mask=key < length, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        held = (key < length)[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(cache + slot[:, None] * HEAD_DIM + d[None, :], mask=held, other=0.0).to(tile.dtype)
        products = tl.maximum(tl.dot(tile, tl.trans(k), input_precision="ieee"), 0.0)
        tl.store(scores + token * score_stride + key, tl.sum(products * weight[:, None], axis=0), mask=key < length)


@triton.jit(do_not_specialize_on_alignment=["scores", "rows", "lengths", "chosen"])
def _choose(
    scores, page_table, rows, lengths, chosen, table_stride: int, score_stride: int,
    TOP: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query. Finds the lowest score that is taken, eight of its bits at a time, and how many that are equal to it;
    then writes the slots."""
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + token)
    line, target = scores + token * score_stride, chosen + token * TOP
    pages = page_table + tl.load(rows + token).to(tl.int64) * table_stride
    offset, digits = tl.arange(0, BLOCK), tl.arange(0, 256)
    if length <= TOP:
        for start in range(0, length, BLOCK):
            key = start + offset
            page = tl.load(pages + key // PAGE_SIZE, mask=key < length, other=0)
            tl.store(target + key, page * PAGE_SIZE + key % PAGE_SIZE, mask=key < length)
    else:
        left, lowest = TOP, tl.full([], 0, tl.uint32)  # still to be taken, and the bits that are known
        for step in tl.static_range(4):
            counts = tl.zeros([256], tl.int32)
            for start in range(0, length, BLOCK):
                bits = _ordered(line, start + offset, length)
                mine = start + offset < length
                if step > 0:
                    mine = mine & (bits >> (32 - 8 * step) == lowest)
                counts += tl.histogram(((bits >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=mine)
            above = tl.sum(counts) - tl.cumsum(counts, 0)  # that have a greater digit
            digit = (above < left) & (above + counts >= left)
            lowest = lowest * 256 + tl.sum(tl.where(digit, digits, 0)).to(tl.uint32)
            left -= tl.sum(tl.where(digit, above, 0))
        taken, equals = 0, 0
        for start in range(0, length, BLOCK):
            key = start + offset
            bits = _ordered(line, key, length)
            equal = ((bits == lowest) & (key < length)).to(tl.int32)
            place = equals + tl.cumsum(equal, 0)
            take = (key < length) & ((bits > lowest) | ((equal > 0) & (place <= left)))
            order = taken + tl.cumsum(take.to(tl.int32), 0) - 1
            page = tl.load(pages + key // PAGE_SIZE, mask=take, other=0)
            tl.store(target + order, page * PAGE_SIZE + key % PAGE_SIZE, mask=take)
            taken += tl.sum(take.to(tl.int32))
            equals += tl.sum(equal)


@triton.jit
def _ordered(line, key, length):
    """The bits of scores as numbers that are ordered like them. uint32"""
    bits = tl.load(line + key, mask=key < length, other=0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
