"""The device code of the expert products: by rows for a token or two, by tiles for any number.

By tiles, the rows of a program are pairs of token and expert, all of one expert. For many tokens an `Order` says which;
for a few, a program looks through all choices: the first pair of an expert does the work for all of them. A pair whose
expert is -1 is another rank's.

Weights of 8 bits have scales, one for each row or for every 128 inputs of it. They are multiplied in the type of the
rows: 16 bits, or 8 bits with scales of their own. Those of 4 bits, which have zero points too or are floats, become 16
bits.
"""

import triton
import triton.language as tl

from bough.kernels.activation.triton import gated
from bough.kernels.overlap import take_turn, take_turn_first
from bough.kernels.scaled_linear.device import add_product, factors, scaled, tile_of
from bough.kernels.skinny_linear.device import sums_of_rows
from bough.kernels.w4_linear.device import w4_tile


@triton.jit
def gate_up_by_rows(
    x, gate_up, scales, bias, ids, out, x_stride, INNER,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One pair: rows of its expert's gate and up whole and in registers (see `skinny_linear.device`)."""
    PAIRED: tl.constexpr = ACTIVATION != "relu2"
    n, pair = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    k = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    take_turn_first(OVERLAP)  # `down_by_rows` reads the ids early
    expert = tl.load(ids + pair).to(tl.int64)
    there = (n < INNER) & (expert >= 0)
    inside = there[:, None, None] & (k < K)[None, :, :]
    first = expert * (2 if PAIRED else 1) * INNER + n  # of the gate's rows
    rows = gate_up + first[:, None, None] * K + k[None, :, :]
    gate = tl.load(rows, mask=inside, other=0.0, eviction_policy="evict_first")
    if PAIRED:
        up = tl.load(rows + INNER.to(tl.int64) * K, mask=inside, other=0.0, eviction_policy="evict_first")
    row = tl.load(x + pair // TOP * x_stride + k, mask=k < K, other=0.0)
    g = sums_of_rows(gate, row, scales, first, there, GROUPS)
    if bias is not None:
        g += tl.load(bias + first, mask=there, other=0.0)
    g = g.to(row.dtype)
    u = g
    if PAIRED:
        u = sums_of_rows(up, row, scales, first + INNER, there, GROUPS)
        if bias is not None:
            u += tl.load(bias + first + INNER, mask=there, other=0.0)
        u = u.to(row.dtype)
    tl.store(out + pair * INNER + n, gated(g, u, ACTIVATION, SLOPE, LIMIT), mask=there)


@triton.jit
def down_by_rows(
    inner, down, scales, bias, ids, weights, out, N,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    PIECE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token: rows of all its experts, and their weighted sum."""
    n, token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    k = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    expert = tl.load(ids + token * TOP).to(tl.int64)
    there, first = (n < N) & (expert >= 0), expert * N + n
    w = tl.load(
        down + first[:, None, None] * K + k[None, :, :], mask=there[:, None, None] & (k < K)[None, :, :], other=0.0
    )
    take_turn(OVERLAP)  # the first expert's weights are already on their way
    # One sum over columns, at the end: each needs all threads to wait, and meanwhile nothing would be read.
    total = tl.zeros((BLOCK_N, PIECES, PIECE), dtype=tl.float32)
    shift = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        pair = token * TOP + slot
        if slot > 0:
            expert = tl.load(ids + pair).to(tl.int64)
            there, first = (n < N) & (expert >= 0), expert * N + n
            w = tl.load(
                down + first[:, None, None] * K + k[None, :, :],
                mask=there[:, None, None] & (k < K)[None, :, :],
                other=0.0,
            )
        row = tl.load(inner + pair * K + k, mask=(k < K) & (expert >= 0), other=0.0).to(tl.float32)
        row *= tl.load(weights + pair)
        products = w.to(tl.float32) * row[None, :, :]
        if scales is not None:
            piece = tl.arange(0, PIECES)[None, :]
            group = piece if GROUPS > 1 else 0 * piece
            places = scales + first[:, None] * GROUPS + group
            products *= tl.load(places, mask=there[:, None] & (group < GROUPS), other=0.0)[:, :, None]
        total += products
        if bias is not None:
            shift += tl.load(bias + first, mask=there, other=0.0) * tl.load(weights + pair)
    target, result = out + token * N + n, tl.sum(tl.sum(total, axis=1), axis=1)
    if bias is not None:
        result += shift
    tl.store(target, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["tokens"])
def product_by_tiles(
    x, x_scales, matrices, scales, zeros, bias, ids, weights, order, table, out, x_stride, tokens, N,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, DESCRIBED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` columns of a tile of pairs, each in a row of its own. With an activation, which reads the tokens' rows:
    `activation(gate) * up`. Without one, which reads the pairs' rows: their weighted results."""
    ACTIVE: tl.constexpr = ACTIVATION != ""
    PAIRED: tl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    columns, at = tl.cdiv(N, BLOCK_N), tl.arange(0, BLOCK_N)
    tile, n = tl.program_id(0) // columns, tl.program_id(0) % columns * BLOCK_N + at
    take_turn(OVERLAP)
    expert, pair, there, busy = _rows_of(tile, ids, order, table, tokens, TOP, BLOCK_S, BLOCK_P, BLOCK_M)
    if busy:
        line = pair // TOP if ACTIVE else pair
        rows = x + line.to(tl.int64)[:, None] * (x_stride if ACTIVE else K)
        first = expert * (2 * N if PAIRED else N) + tl.program_id(0) % columns * BLOCK_N  # of a gate's rows, or of all
        acc = _zeros(BLOCK_M, BLOCK_N, SWAP)
        up = acc
        for start in range(0, K, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            here = tl.load(rows + k, mask=there[:, None] & (k < K), other=0.0)
            w = _weights(matrices, scales, zeros, first, start, n < N, K, GROUP, BLOCK_N, BLOCK_K, DESCRIBED)
            acc = add_product(acc, here, w, x_scales, line, there, scales, first + at, n < N, start, GROUPS, SWAP)
            if PAIRED:
                w = _weights(matrices, scales, zeros, first + N, start, n < N, K, GROUP, BLOCK_N, BLOCK_K, DESCRIBED)
                up = add_product(up, here, w, x_scales, line, there, scales, first + N + at, n < N, start, GROUPS, SWAP)
        if GROUPS == 1 and scales is not None and zeros is None:
            of_rows = factors(x_scales, line, there, 0, GROUPS)
            acc = scaled(acc, of_rows, factors(scales, first + at, n < N, 0, GROUPS), SWAP)
            if PAIRED:
                up = scaled(up, of_rows, factors(scales, first + N + at, n < N, 0, GROUPS), SWAP)
        if bias is not None:
            acc = _add_bias(acc, bias + first + at, n < N, SWAP)
            if PAIRED:
                up = _add_bias(up, bias + first + N + at, n < N, SWAP)
        kind = out.dtype.element_ty
        if ACTIVE:
            up = up if PAIRED else acc
            acc = gated(acc.to(kind), up.to(kind), ACTIVATION, SLOPE, LIMIT)
        if SWAP:
            acc = tl.trans(acc)
        if weights is not None:
            acc *= tl.load(weights + pair, mask=there, other=0.0)[:, None]
        target = out + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(target, acc.to(kind), mask=there[:, None] & (n < N)[None, :])


@triton.jit
def sum_of_pairs(
    results, ids, counts, out, N,
    TOP: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The results of each token's experts that are here added up, in their order; clears the experts' counters."""
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    take_turn(OVERLAP)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        pair = token * TOP + slot
        there = (n < N) & (tl.load(ids + pair) >= 0)
        total += tl.load(results + pair * N + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)
    if EXPERTS > 0 and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(counts + tl.arange(0, EXPERTS), tl.zeros((EXPERTS,), dtype=tl.int32))


@triton.jit
def _rows_of(
    tile, ids, order, table, tokens,
    TOP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The expert of a tile, its pairs, which of those rows are there, and whether the tile has any work."""
    m = tl.arange(0, BLOCK_M)
    if table is not None:
        expert, first, rows = tl.load(table + tile * 3), tl.load(table + tile * 3 + 1), tl.load(table + tile * 3 + 2)
        there = m < rows
        pair = tl.load(order + first + m, mask=there, other=0)
        busy = rows > 0
    else:
        expert = tl.load(ids + tile)
        p = tl.arange(0, BLOCK_P)
        chosen = tl.load(ids + p, mask=p < tokens * TOP, other=-1)
        busy = (expert >= 0) & (tl.min(tl.where(chosen == expert, p, BLOCK_P), axis=0) == tile)
        slot = tl.arange(0, BLOCK_S)[None, :]
        mask = (m < tokens)[:, None] & (slot < TOP)
        own = (tl.load(ids + m[:, None] * TOP + slot, mask=mask, other=-1) == expert).to(tl.int32)
        there = tl.max(own, axis=1) > 0
        pair = m * TOP + tl.sum(own * slot, axis=1)
    return expert, pair, there, busy


@triton.jit
def _weights(
    matrices, scales, zeros, first, start, inside,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    if zeros is not None:
        tl.static_assert(BLOCK_K == 128)
        w = w4_tile(matrices, scales, zeros, first, start, inside, K, GROUP, BLOCK_N)
    else:
        w = tile_of(matrices, first, start, inside, K, BLOCK_N, BLOCK_K, DESCRIBED)
    return w


@triton.jit
def _add_bias(acc, places, inside, SWAP: tl.constexpr):
    """acc with its columns' biases, or, if it is transposed, its rows'."""
    bias = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    if SWAP:
        acc += bias[:, None]
    else:
        acc += bias[None, :]
    return acc


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        zeros = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    return zeros
