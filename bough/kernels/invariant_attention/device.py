"""The kernels of invariant attention.

A tile has a line for each pair of query and packed head, whether it holds one decode or a block of a prompt. Keys come
from the pages only, in blocks that begin at multiples of BLOCK_N from the row's first key on, and in chunks (see
`triton`); a line's arithmetic then depends on its own position alone:

- a block of which a line sees nothing leaves the line as it was, exactly;
- keys of a block that a line does not see have the weight 0, whatever is in their place;
- every product that is added to something is written as a fused multiply-add and the compiler must make no
  others, so that two kernels that say the same compute the same.

Scores are kept in units of log2, since exp2 is what the hardware has.
"""

import triton
import triton.language as tl

from bough.kernels.decode_attention.work import oldest_seen
from bough.kernels.prefill_attention.triton import IN_LOG2, fetch


# The heads of an item are neighbours in the grid, so that those with the same keys run at the same time. What differs
# from step to step is not specialised on: all steps run the same code.
@triton.jit(do_not_specialize_on_alignment=["rows", "query_starts", "lengths", "items"])
def attend(
    q, k_cache, v_cache, page_table, rows, query_starts, lengths, items, sinks, out, totals, log_sums,
    q_token_stride: int, q_head_stride: int, table_stride: int, scale: float, v_scale: float, softcap: float,
    HAS_SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr, PAGE_SIZE: tl.constexpr,
    FIELDS: tl.constexpr, CHUNK: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Items by turns with the other programs of the same heads."""
    first_head = tl.program_id(0) * PACK
    kv_head = first_head // (HEADS // KV_HEADS)
    line = tl.arange(0, BLOCK_M)
    head = first_head + line % PACK
    d = tl.arange(0, BLOCK_D)
    for item in range(tl.program_id(1), tl.load(items), tl.num_programs(1)):
        entry = items + (1 + item) * FIELDS
        place, first, only = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        row_start = tl.load(query_starts + place)
        queries = tl.load(query_starts + place + 1) - row_start
        context = tl.load(lengths + place) - queries
        pages = page_table + tl.load(rows + place).to(tl.int64) * table_stride

        query = first + line // PACK  # inside the row
        token = row_start.to(tl.int64) + query
        valid = (query < queries)[:, None] & (d < HEAD_DIM)[None, :]
        lines = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride
        tile = tl.load(lines + d[None, :], mask=valid, other=0.0)
        more = tile
        if EXTRA:
            e = tl.arange(0, BLOCK_E)
            more_valid = (query < queries)[:, None] & (e < EXTRA)[None, :]
            more = tl.load(lines + HEAD_DIM + e[None, :], mask=more_valid, other=0.0)

        oldest = oldest_seen(context + first, WINDOW, CHUNKED) if WINDOW else 0  # key that any line sees
        seen_from = oldest_seen(context + query, WINDOW, CHUNKED) if WINDOW else query  # each line
        end = context + tl.minimum(first + BLOCK_M // PACK, queries)
        begin_chunk, end_chunk = oldest // CHUNK, tl.cdiv(end, CHUNK)
        if only >= 0:
            begin_chunk, end_chunk = only, only + 1
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for chunk in range(begin_chunk, end_chunk):
            begin = tl.maximum(chunk * CHUNK, oldest // BLOCK_N * BLOCK_N)
            stop = tl.minimum((chunk + 1) * CHUNK, end)
            part, log_sum = _attend_chunk(
                tile, more, context + query, seen_from, k_cache, v_cache, pages, kv_head, begin, stop,
                context + first + 1, scale, softcap, HAS_SOFTCAP, WINDOW, KV_HEADS, HEAD_DIM, EXTRA, PAGE_SIZE, BLOCK_M,
                BLOCK_N, BLOCK_D, BLOCK_E,
            )  # fmt: skip
            peak, shrink, fresh = weigh(peak, log_sum)
            weight = tl.fma(weight, shrink, fresh)
            total = tl.fma(total, tl.broadcast_to(shrink[:, None], [BLOCK_M, BLOCK_D]), part * fresh[:, None])

        if only >= 0:
            tl.store(totals + (item * HEADS + head)[:, None] * HEAD_DIM + d[None, :], total, mask=valid)
            tl.store(log_sums + item * HEADS + head, peak, mask=query < queries)
        else:
            if sinks is not None:
                weight += of_sink(sinks + head, peak)
            result = (total / weight[:, None] * v_scale).to(out.dtype.element_ty)
            tl.store(out + (token * HEADS + head)[:, None] * HEAD_DIM + d[None, :], result, mask=valid)


@triton.jit
def merge(
    first_item, query_starts, sinks, totals, log_sums, out,
    v_scale: float,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Merges the chunks of one split decode, for BLOCK_E neighbouring elements of its heads, as `attend` does."""
    place = tl.program_id(1)
    begin, end = tl.load(first_item + place), tl.load(first_item + place + 1)
    if end - begin == 1:
        return
    element = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    valid = element < HEADS * HEAD_DIM
    total = tl.zeros([BLOCK_E], tl.float32)
    weight = tl.zeros([BLOCK_E], tl.float32)
    peak = tl.full([BLOCK_E], float("-inf"), tl.float32)
    for item in range(begin, end):
        log_sum = tl.load(log_sums + item * HEADS + element // HEAD_DIM, mask=valid, other=0.0)
        part = tl.load(totals + item * (HEADS * HEAD_DIM) + element, mask=valid, other=0.0)
        peak, shrink, fresh = weigh(peak, log_sum)
        weight = tl.fma(weight, shrink, fresh)
        total = tl.fma(total, shrink, part * fresh)
    if sinks is not None:
        weight += of_sink(sinks + tl.minimum(element // HEAD_DIM, HEADS - 1), peak)
    token = tl.load(query_starts + place).to(tl.int64)
    result = (total / weight * v_scale).to(out.dtype.element_ty)
    tl.store(out + token * (HEADS * HEAD_DIM) + element, result, mask=valid)


@triton.jit
def weigh(peak: tl.tensor, log_sum: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The peak with one more chunk, and what the sums so far and the chunk's own are multiplied with.

    The first chunk gets a weight of exactly 1, and one of which nothing was seen exactly 0.
    """
    new_peak = tl.maximum(peak, log_sum)
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, tl.exp2(peak - origin), tl.exp2(log_sum - origin)


@triton.jit
def of_sink(sinks: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """The weights of the sinks at these places, by the peaks of all their keys."""
    return tl.exp2(tl.fma(tl.load(sinks).to(tl.float32), IN_LOG2, -peak))


@triton.jit
def _attend_chunk(
    tile, more, position, seen_from, k_cache, v_cache, pages, kv_head, begin, stop,
    common,  # the keys below it are seen by every line, unless there is a window
    scale, softcap,
    HAS_SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    EXTRA: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Attention over the keys begin..stop alone, and the log2 of its weights' sum; 0 and -inf where nothing is seen."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    border = begin
    if not WINDOW:
        border = tl.maximum(begin, tl.minimum(stop, common // BLOCK_N * BLOCK_N))
    for masked in tl.static_range(1 if WINDOW else 0, 2):
        acc, norm, top = _over_keys(
            acc, norm, top, tile, more, position, seen_from, k_cache, v_cache, pages, kv_head,
            border if masked else begin, stop if masked else border, scale, softcap, masked, HAS_SOFTCAP, WINDOW,
            KV_HEADS, HEAD_DIM, EXTRA, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    seen = norm > 0.0
    norm = tl.where(seen, norm, 1.0)
    part = tl.where(seen[:, None], acc / norm[:, None], 0.0)
    return part, tl.where(seen, top + tl.log2(norm), float("-inf"))


@triton.jit
def _over_keys(
    acc, norm, top, tile, more, position, seen_from, k_cache, v_cache, pages, kv_head, begin, end, scale, softcap,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, EXTRA: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Folds the keys begin..end into the running softmax: weighted values, sum of weights, and greatest score."""
    d = tl.arange(0, BLOCK_D)
    offset = tl.arange(0, BLOCK_N)
    page = tl.load(pages + (begin + offset) // PAGE_SIZE, mask=begin + offset < end, other=0)
    for start in range(begin, end, BLOCK_N):
        key = start + offset
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE  # a pool has more than 2^31 elements
        line = (slot * KV_HEADS + kv_head)[:, None] * (HEAD_DIM + EXTRA)
        offsets = line + d[None, :]
        # One block ahead, in registers: keys and values can then be fetched as far ahead as the stages allow.
        page = tl.load(pages + (key + BLOCK_N) // PAGE_SIZE, mask=key + BLOCK_N < end, other=0)
        k = fetch(k_cache + offsets, key < end, MASKED, HEAD_DIM, BLOCK_D).to(tile.dtype)
        if EXTRA:  # latents, whose first columns are the values
            v = k
            ends = k_cache + line + HEAD_DIM + tl.arange(0, BLOCK_E)[None, :]
            more_k = fetch(ends, key < end, MASKED, EXTRA, BLOCK_E).to(tile.dtype)
        else:
            v = fetch(v_cache + offsets, key < end, MASKED, HEAD_DIM, BLOCK_D).to(tile.dtype)
        scores = tl.dot(tile, tl.trans(k), input_precision="ieee")
        if EXTRA:
            scores = tl.dot(more, tl.trans(more_k), scores, input_precision="ieee")
        if HAS_SOFTCAP:
            scores = softcap * tl.fma(tl.sigmoid(2.0 * scale * scores), 2.0, -1.0)  # softcap * tanh
        if MASKED:
            visible = position[:, None] >= key[None, :]
            if WINDOW:
                visible = visible & (key[None, :] >= seen_from[:, None])
            # Not infinite: a line may see no key of the block, and infinity minus infinity is not a number.
            scores = tl.where(visible, scores, -1e30)
        unit = 1.0 if HAS_SOFTCAP else scale
        new_top = tl.maximum(top, tl.max(scores, 1) * unit)
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(tl.fma(scores, unit, -new_top[:, None]))
        if MASKED:
            # Where a line sees nothing, that is the rounding of huge numbers, and its power anything.
            weights = tl.where(visible, weights, 0.0)
        norm = tl.fma(norm, shrink, tl.sum(weights, 1))
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, norm, top
