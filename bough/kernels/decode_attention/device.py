"""What kernels that decode have in common: taking in a block of keys, and handing in the result of an item.

Scores are kept in units of log2, since exp2 is what the hardware has.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call,assignment"
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scaled(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Products of queries and keys as scores."""
    scores = scores * scale
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # tanh, by a function that overflows to its limits
    return scores


@triton.jit
def absorb(queries, k, v, present, top, norm, acc, scale, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Takes a block of keys and values into what was summed before: the largest score, the sum of weights, and that of
    weighted values. One of the block's keys, or one before it, must be present."""
    products = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    return fold(products, v, present, top, norm, acc, scale, softcap, HAS_SOFTCAP, PRECISION)


@triton.jit
def fold(products, v, present, top, norm, acc, scale, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """The same, by the products of queries and keys."""
    scores = scaled(products, scale, softcap, HAS_SOFTCAP)
    scores = tl.where(present[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    norm = norm * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, norm, acc


@triton.jit
def join_sink(sinks, first_item, place, item, kv_head, top, norm, acc, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """Takes the logits of the heads' sinks into the sums of a row's first item: of its parts, one has them."""
    member = tl.arange(0, BLOCK_G)
    own = (member < GROUP) & (item == tl.load(first_item + place, cache_modifier=".cg"))
    sink = tl.load(sinks + kv_head * GROUP + member, mask=own, other=float("-inf")).to(tl.float32) * LOG2_E
    new_top = tl.maximum(top, sink)
    shrink = tl.exp2(top - new_top)
    return new_top, norm * shrink + tl.exp2(sink - new_top), acc * shrink[:, None]


@triton.jit
def leave(
    result,  # [BLOCK_G, BLOCK_D]
    log_sum,  # [BLOCK_G]
    place, item, parts, kv_head, out, partial, log_sums,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Stores the result of an item's query heads: where it belongs, or with the other parts of its row."""
    member, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + member
    valid = (member < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    if parts == 1:
        line = place.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(out + line[:, None] * HEAD_DIM + d[None, :], result.to(out.dtype.element_ty), mask=valid)
    else:
        line = item.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(partial + line[:, None] * HEAD_DIM + d[None, :], result, mask=valid)
        tl.store(log_sums + line, log_sum, mask=member < GROUP)


@triton.jit
def hand_in(
    result,  # [BLOCK_G, BLOCK_D]
    log_sum,  # [BLOCK_G]
    place, item, parts, kv_head, out, partial, log_sums, arrivals, first_item, shared, shared_starts, shared_log_sums,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """The same, and if the row was cut into parts, the last program to finish weighs all of them, in their order, so
    that the result does not depend on who was last: BLOCK_PARTS at a time. Parts that were read together with other
    rows (`shared`) are there already."""
    more, more_begin = 0, 0
    if shared is not None:
        more_begin = tl.load(shared_starts + place)
        more = tl.load(shared_starts + place + 1) - more_begin
    leave(
        result, log_sum, place, item, parts + more, kv_head, out, partial, log_sums,
        KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    if parts + more > 1:
        begin = tl.load(first_item + place)
        tl.debug_barrier()  # all threads of the program have written before one of them says so
        counter = arrivals + place * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            SIDE: tl.constexpr = triton.next_power_of_2(GROUP)
            member, d = tl.arange(0, SIDE), tl.arange(0, BLOCK_D)
            top = tl.where(member < GROUP, float("-inf"), 0.0)  # where there is no head, the numbers stay finite
            norm = tl.where(member < GROUP, 0.0, 1.0)
            acc = tl.zeros([SIDE, BLOCK_D], tl.float32)
            if shared is not None:
                top, norm, acc = _weigh(
                    shared, shared_log_sums, more_begin, more, kv_head * GROUP, top, norm, acc,
                    KV_HEADS * GROUP, GROUP, HEAD_DIM, SIDE, BLOCK_D, BLOCK_PARTS,
                )  # fmt: skip
            top, norm, acc = _weigh(
                partial, log_sums, begin, parts, kv_head * GROUP, top, norm, acc,
                KV_HEADS * GROUP, GROUP, HEAD_DIM, SIDE, BLOCK_D, BLOCK_PARTS,
            )  # fmt: skip
            head = place.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + member
            valid = (member < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
            target = out + head[:, None] * HEAD_DIM + d[None, :]
            tl.store(target, (acc / norm[:, None]).to(out.dtype.element_ty), mask=valid)
            tl.store(counter, 0)  # as the next launch finds it


@triton.jit
def _weigh(
    partial, log_sums, begin, parts, first_head, top, norm, acc,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SIDE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Adds the results of `parts` items from `begin` to what was weighed before, by their log-sum-exp. Other programs
    wrote them: they are read past the L1 cache, and several at a time: nothing else is left to do while they come."""
    member, d = tl.arange(0, SIDE), tl.arange(0, BLOCK_D)
    valid = (member < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    for start in range(0, parts, BLOCK_PARTS):
        log_sum, value = (), ()
        for i in tl.static_range(BLOCK_PARTS):
            there = start + i < parts
            line = (begin + start + i).to(tl.int64) * HEADS + first_head + member
            values = partial + line[:, None] * HEAD_DIM + d[None, :]
            mine = (member < GROUP) & there
            log_sum += (tl.load(log_sums + line, mask=mine, other=float("-inf"), cache_modifier=".cg"),)
            value += (tl.load(values, mask=valid & there, other=0.0, cache_modifier=".cg"),)
        new_top = top
        for i in tl.static_range(BLOCK_PARTS):
            new_top = tl.maximum(new_top, log_sum[i])
        shrink = tl.exp2(top - new_top)
        norm, acc = norm * shrink, acc * shrink[:, None]
        for i in tl.static_range(BLOCK_PARTS):
            weight = tl.exp2(log_sum[i] - new_top)
            norm, acc = norm + weight, acc + value[i] * weight[:, None]
        top = new_top
    return top, norm, acc
