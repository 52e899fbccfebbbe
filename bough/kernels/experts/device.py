"""The device code of the expert products: by rows for a token or two, by tiles for any number.

By tiles, the rows of a program are pairs of token and expert, all of one expert. For many tokens an `Order` says which;
for a few, a program looks through all choices: the first pair of an expert does the work for all of them.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from bough.kernels.activation.triton import gated
from bough.kernels.overlap import take_turn, take_turn_first


@triton.jit
def gate_up_by_rows(
    x, gate_up, ids, out, x_stride, INNER,
    K: tl.constexpr, TOP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    PIECE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One pair: rows of its expert's gate and up whole and in registers (see `skinny_linear.device`)."""
    n, pair = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    k = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    inside = (n < INNER)[:, None, None] & (k < K)[None, :, :]
    take_turn_first(OVERLAP)  # `down_by_rows` reads the ids early
    expert = tl.load(ids + pair).to(tl.int64)
    rows = gate_up + (expert * 2 * INNER + n)[:, None, None] * K + k[None, :, :]
    gate = tl.load(rows, mask=inside, other=0.0, eviction_policy="evict_first")
    up = tl.load(rows + INNER.to(tl.int64) * K, mask=inside, other=0.0, eviction_policy="evict_first")
    row = tl.load(x + pair // TOP * x_stride + k, mask=k < K, other=0.0)
    wide = row.to(tl.float32)[None, :, :]
    g = tl.sum(tl.sum(gate.to(tl.float32) * wide, axis=1), axis=1).to(row.dtype)
    u = tl.sum(tl.sum(up.to(tl.float32) * wide, axis=1), axis=1).to(row.dtype)
    tl.store(out + pair * INNER + n, gated(g, u, ACTIVATION), mask=n < INNER)


@triton.jit
def down_by_rows(
    inner, down, ids, weights, out, N,
    K: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token: rows of all its experts, and their weighted sum."""
    n, token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    expert = tl.load(ids + token * TOP).to(tl.int64)
    w = tl.load(down + (expert * N + n)[:, None] * K + k[None, :], mask=inside, other=0.0)
    take_turn(OVERLAP)  # the first expert's weights are already on their way
    # One sum over columns, at the end: each needs all threads to wait, and meanwhile nothing would be read.
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        pair = token * TOP + slot
        if slot > 0:
            expert = tl.load(ids + pair).to(tl.int64)
            w = tl.load(down + (expert * N + n)[:, None] * K + k[None, :], mask=inside, other=0.0)
        row = tl.load(inner + pair * K + k, mask=k < K, other=0.0).to(tl.float32) * tl.load(weights + pair)
        total += w.to(tl.float32) * row[None, :]
    tl.store(out + token * N + n, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["tokens"])
def gate_up_by_tiles(
    x, gate_up, ids, order, table, out, x_stride, tokens, INNER,
    K: tl.constexpr, TOP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    DESCRIBED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`activation(gate) * up` of a tile of pairs and `BLOCK_N` inner columns."""
    columns = tl.cdiv(INNER, BLOCK_N)
    tile, n = tl.program_id(0) // columns, tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    take_turn(OVERLAP)
    expert, pair, there, busy = _rows_of(tile, ids, order, table, tokens, TOP, BLOCK_S, BLOCK_P, BLOCK_M)
    if busy:
        rows = x + (pair // TOP).to(tl.int64)[:, None] * x_stride
        first = expert * 2 * INNER + tl.program_id(0) % columns * BLOCK_N  # of the gate's rows
        gate = _zeros(BLOCK_M, BLOCK_N, SWAP)
        up = _zeros(BLOCK_M, BLOCK_N, SWAP)
        for start in range(0, K, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            here = tl.load(rows + k, mask=there[:, None] & (k < K), other=0.0)
            gate_tile = _weights(gate_up, first, start, n < INNER, K, BLOCK_N, BLOCK_K, DESCRIBED)
            gate = _multiply_add(here, gate_tile, gate, SWAP)
            up_tile = _weights(gate_up, first + INNER, start, n < INNER, K, BLOCK_N, BLOCK_K, DESCRIBED)
            up = _multiply_add(here, up_tile, up, SWAP)
        kind = out.dtype.element_ty
        result = gated(gate.to(kind), up.to(kind), ACTIVATION)
        if SWAP:
            result = tl.trans(result)
        target = out + pair.to(tl.int64)[:, None] * INNER + n[None, :]
        tl.store(target, result, mask=there[:, None] & (n < INNER)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def down_by_tiles(
    inner, down, ids, weights, order, table, out, tokens, N,
    K: tl.constexpr, TOP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, DESCRIBED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The weighted results of a tile of pairs, each in a row of its own."""
    columns = tl.cdiv(N, BLOCK_N)
    tile, n = tl.program_id(0) // columns, tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    take_turn(OVERLAP)
    expert, pair, there, busy = _rows_of(tile, ids, order, table, tokens, TOP, BLOCK_S, BLOCK_P, BLOCK_M)
    if busy:
        rows = inner + pair.to(tl.int64)[:, None] * K
        first = expert * N + tl.program_id(0) % columns * BLOCK_N
        acc = _zeros(BLOCK_M, BLOCK_N, SWAP)
        for start in range(0, K, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            here = tl.load(rows + k, mask=there[:, None] & (k < K), other=0.0)
            w = _weights(down, first, start, n < N, K, BLOCK_N, BLOCK_K, DESCRIBED)
            acc = _multiply_add(here, w, acc, SWAP)
        if SWAP:
            acc = tl.trans(acc)
        acc *= tl.load(weights + pair, mask=there, other=0.0)[:, None]
        target = out + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=there[:, None] & (n < N)[None, :])


@triton.jit
def sum_of_pairs(
    results, counts, out, N,
    TOP: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Each token's results added up, in their order; clears the experts' counters."""
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    take_turn(OVERLAP)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        total += tl.load(results + (token * TOP + slot) * N + n, mask=n < N, other=0.0).to(tl.float32)
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
        busy = tl.min(tl.where(chosen == expert, p, BLOCK_P), axis=0) == tile
        slot = tl.arange(0, BLOCK_S)[None, :]
        mask = (m < tokens)[:, None] & (slot < TOP)
        own = (tl.load(ids + m[:, None] * TOP + slot, mask=mask, other=-1) == expert).to(tl.int32)
        there = tl.max(own, axis=1) > 0
        pair = m * TOP + tl.sum(own * slot, axis=1)
    return expert, pair, there, busy


@triton.jit
def _weights(
    weight, first, start, inside,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A tile of weight rows from `first` and inputs from `start` on. Through a descriptor, rows that are not `inside`
    are those of the next matrix; nobody reads what comes of them."""
    if DESCRIBED:
        tile = weight.load([first, start])
    else:
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        rows = (first + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        tile = tl.load(weight + rows * K + k, mask=inside[:, None] & (k < K), other=0.0)
    return tile


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        zeros = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    return zeros


@triton.jit
def _multiply_add(rows, w, acc, SWAP: tl.constexpr):
    """acc + rows @ w.T, or its transpose: tensor cores take 64 rows at least, and the weight always has them."""
    if SWAP:
        acc = tl.dot(w, rows.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, w.T, acc, input_precision="ieee")
    return acc
