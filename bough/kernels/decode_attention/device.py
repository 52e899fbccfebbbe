"""What kernels that decode have in common: taking in a block of keys, and handing in the result of an item.

Scores are kept in units of log2, since exp2 is what the hardware has.
"""

# mypy: disable-error-code="assignment"
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scaled(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Products of queries and keys as scores."""
    scores = scores * scale
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # tanh, by a function that overflows to its limits
    return scores


@triton.jit
def absorb(queries, k, v, present, top, norm, acc, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Takes a block of keys and values into what was summed before: the largest score, the sum of weights, and that of
    weighted values. One of the block's keys, or one before it, must be present."""
    products = tl.dot(queries, tl.trans(k), input_precision="ieee")
    return fold(products, v, present, top, norm, acc, scale, softcap, HAS_SOFTCAP)


@triton.jit
def fold(products, v, present, top, norm, acc, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The same, by the products of queries and keys."""
    top, norm, shrink, weights = weigh(products, present, top, norm, scale, softcap, HAS_SOFTCAP)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return top, norm, acc


@triton.jit
def weigh(products, present, top, norm, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The new largest score and sum of weights, what sums so far shrink by, and the weights of a block."""
    scores = scaled(products, scale, softcap, HAS_SOFTCAP)
    scores = tl.where(present[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    return new_top, norm * shrink + tl.sum(weights, 1), shrink, weights


@triton.jit
def attend_over(
    queries, more_queries,  # [lines, BLOCK_D], and of latents the columns that are keys alone [lines, BLOCK_E]
    k_cache, v_cache, pages, first, last, kv_head, top, norm, acc, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `first` to `last` of a line of the page table into what was summed before."""
    kind: tl.constexpr = queries.dtype
    if k_cache.dtype.element_ty.primitive_bitwidth == 8 and kind == tl.float16 and BLOCK_D > 16 and not EXTRA:
        return attend_in_pairs(
            queries, k_cache, v_cache, pages, first, last, kv_head, top, norm, acc, scale, softcap,
            HAS_SOFTCAP, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    key, d, e = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), HEAD_DIM + tl.arange(0, BLOCK_E)
    page = tl.load(pages + (first + key) // PAGE_SIZE, mask=first + key < last, other=0)
    for start in range(first, last, BLOCK_N):
        token = start + key
        present = token < last
        slot = page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE  # a pool has more than 2^31 elements
        line = slot * (HEAD_DIM + EXTRA) if EXTRA else (slot * KV_HEADS + kv_head) * HEAD_DIM
        offsets = line[:, None] + d[None, :]
        # One block ahead, in registers: keys and values can then be fetched as far ahead as the stages allow.
        ahead = token + BLOCK_N
        page = tl.load(pages + ahead // PAGE_SIZE, mask=ahead < last, other=0)
        # What is not this row's must not be read: the pool is never cleared, and 0 * NaN is NaN.
        held = present[:, None]
        if HEAD_DIM != BLOCK_D:
            held = held & (d < HEAD_DIM)[None, :]
        k = tl.load(k_cache + offsets, mask=held, other=0.0).to(kind)
        if EXTRA:
            v = k
            more_held = present[:, None] & (e < HEAD_DIM + EXTRA)[None, :]
            more_k = tl.load(k_cache + line[:, None] + e[None, :], mask=more_held, other=0.0).to(kind)
        else:
            v = tl.load(v_cache + offsets, mask=held, other=0.0).to(kind)
        products = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if EXTRA:
            products = tl.dot(more_queries, tl.trans(more_k), products, input_precision="ieee")
        top, norm, acc = fold(products, v, present, top, norm, acc, scale, softcap, HAS_SOFTCAP)
    return top, norm, acc


@triton.jit
def attend_in_pairs(
    queries, k_cache, v_cache, pages, first, last, kv_head, top, norm, acc, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same for caches of 8 bits, whose columns are read in pairs, as numbers of 16 bits: those reach tensor cores
    as they take them, single bytes one by one. The columns with even numbers are multiplied apart from the others."""
    LINES: tl.constexpr = queries.shape[0]
    key, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D // 2)
    even_q, odd_q = tl.split(tl.reshape(queries, (LINES, BLOCK_D // 2, 2)))
    even, odd = tl.split(tl.reshape(acc, (LINES, BLOCK_D // 2, 2)))
    kind: tl.constexpr = k_cache.dtype.element_ty
    k_pairs, v_pairs = k_cache.to(tl.pointer_type(tl.int16)), v_cache.to(tl.pointer_type(tl.int16))
    page = tl.load(pages + (first + key) // PAGE_SIZE, mask=first + key < last, other=0)
    for start in range(first, last, BLOCK_N):
        token = start + key
        present = token < last
        slot = page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE
        offsets = ((slot * KV_HEADS + kv_head) * (HEAD_DIM // 2))[:, None] + d[None, :]
        ahead = token + BLOCK_N
        page = tl.load(pages + ahead // PAGE_SIZE, mask=ahead < last, other=0)
        held = present[:, None] & (d < HEAD_DIM // 2)[None, :]
        k = tl.load(k_pairs + offsets, mask=held, other=0)
        v = tl.load(v_pairs + offsets, mask=held, other=0)
        even_k, odd_k = _apart(k, kind)
        products = tl.dot(even_q, tl.trans(even_k))
        products = tl.dot(odd_q, tl.trans(odd_k), products)
        top, norm, shrink, weights = weigh(products, present, top, norm, scale, softcap, HAS_SOFTCAP)
        weights = weights.to(tl.float16)
        even_v, odd_v = _apart(v, kind)
        even = tl.dot(weights, even_v, even * shrink[:, None])
        odd = tl.dot(weights, odd_v, odd * shrink[:, None])
    return top, norm, tl.reshape(tl.join(even, odd), (LINES, BLOCK_D))


@triton.jit
def _apart(pairs, kind: tl.constexpr):
    """The first and the second numbers of 8 bits of pairs, as float16."""
    if cuda_capability_geq(8, 9):
        NAME: tl.constexpr = "e4m3x2" if kind == tl.float8e4nv else "e5m2x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 even, odd; .reg .b32 both; prmt.b32 both, $2, 0, 0x3120; mov.b32 {even, odd}, both; "
            "cvt.rn.f16x2." + NAME + " $0, even; cvt.rn.f16x2." + NAME + " $1, odd; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    odd = (pairs >> 8).to(tl.int8).to(kind, bitcast=True)
    return pairs.to(tl.int8).to(kind, bitcast=True).to(tl.float16), odd.to(tl.float16)


@triton.jit
def join_shared(
    shared, log_sums, starts, first_item, place, item, kv_head, top, norm, acc,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Takes what was read together with other rows into the sums of a row's first item, before its own keys: few parts,
    which come while those do."""
    member, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    there = (member < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    begin = tl.load(starts + place)
    parts = tl.where(item == tl.load(first_item + place), tl.load(starts + place + 1) - begin, 0)
    for part in range(parts):
        line = (begin + part).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + member
        log_sum = tl.load(log_sums + line, mask=member < GROUP, other=0.0)
        value = tl.load(shared + line[:, None] * HEAD_DIM + d[None, :], mask=there, other=0.0)
        new_top = tl.maximum(top, log_sum)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(log_sum - new_top)
        norm, acc = norm * shrink + weight, acc * shrink[:, None] + value * weight[:, None]
        top = new_top
    return top, norm, acc


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
    place, item, parts, kv_head, out, partial, log_sums, arrivals, first_item,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """The same, and if the row was cut into parts, the last program to finish weighs all of them, in their order, so
    that the result does not depend on who was last: BLOCK_PARTS at a time."""
    leave(
        result, log_sum, place, item, parts, kv_head, out, partial, log_sums,
        KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    if parts > 1:
        begin = tl.load(first_item + place)
        tl.debug_barrier()  # all threads of the program have written before one of them says so
        counter = arrivals + place * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            SIDE: tl.constexpr = triton.next_power_of_2(GROUP)
            member, d = tl.arange(0, SIDE), tl.arange(0, BLOCK_D)
            top = tl.where(member < GROUP, float("-inf"), 0.0)  # where there is no head, the numbers stay finite
            norm = tl.where(member < GROUP, 0.0, 1.0)
            acc = tl.zeros([SIDE, BLOCK_D], tl.float32)
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
