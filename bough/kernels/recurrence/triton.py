"""The recurrences in Triton: token by token with the matrix in registers, or prompts in chunks; and the short
convolution, of which a program takes some channels of a row through the step, and then their tail.

Chunks are tiles of the whole step, whatever rows stand in them: a row takes its part of each. What makes tokens of a
tile know of each other is the inverse of a triangular matrix, and a row's part of that inverse is the inverse of the
row's part; so all tiles are inverted at once, and then every row goes through its own.
"""

import torch
import triton
import triton.language as tl

from bough.kernels.recurrence.reference import NORM_EPS, StateRows

BLOCK_CHANNELS, BLOCK_TOKENS = 128, 32


def causal_conv_(
    x: torch.Tensor,  # its last dimension contiguous
    weight: torch.Tensor,  # contiguous
    bias: torch.Tensor | None,
    tails: torch.Tensor,  # its last two dimensions contiguous
    rows: StateRows,
    silu: bool = True,
) -> torch.Tensor:
    """As the reference. Rows are distinct, apart from padding, which writes to page 0."""
    tokens, channels = x.shape
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    _causal_conv[(len(rows.rows), triton.cdiv(channels, BLOCK_CHANNELS))](
        x, weight, bias, tails, out, rows.table, rows.rows, rows.starts, rows.drafted,
        x.stride(0), tails.stride(0), rows.table.stride(0),
        CHANNELS=channels, WIDTH=weight.shape[1], SILU=silu, BLOCK_C=BLOCK_CHANNELS,
        BLOCK_T=1 if rows.starts is None else BLOCK_TOKENS,
        num_warps=1 if rows.starts is None else 4,
    )  # fmt: skip
    return out


# How many rows have drafts changes from step to step: no kernel is compiled for one number of them.
@triton.jit(do_not_specialize=["drafted"])
def _causal_conv(
    x, weight, bias, tails, out, table, rows, starts, drafted, token_stride, page_stride, table_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    begin, end = place, place + 1
    if starts is not None:
        begin, end = tl.load(starts + place), tl.load(starts + place + 1)
    if end <= begin:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CHANNELS
    page = tl.load(table + tl.load(rows + place).to(tl.int64) * table_stride).to(tl.int64)
    tail = tails + page * page_stride + c
    for first in range(begin, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        if bias is not None:
            total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            at = t + (tap + 1 - WIDTH)
            old = (at < begin)[:, None] & inside[None, :]
            fresh = ((at >= begin) & (t < end))[:, None] & inside[None, :]
            value = tl.load(x + at.to(tl.int64)[:, None] * token_stride + c[None, :], mask=fresh, other=0.0)
            kept = tl.load(tail[None, :] + (at - begin + WIDTH - 1)[:, None] * CHANNELS, mask=old, other=0.0)
            scale = tl.load(weight + c * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
            total += scale[None, :] * tl.where(old, kept, value.to(tl.float32))
        if SILU:
            total *= tl.sigmoid(total)
        places = out + t.to(tl.int64)[:, None] * CHANNELS + c[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=(t < end)[:, None] & inside[None, :])
    tl.debug_barrier()  # other threads may still read what this one overwrites
    for slot in tl.static_range(WIDTH - 1):
        # Of a row with few tokens, what was behind moves up: it is read before its own slot is written.
        at = end - (WIDTH - 1) + slot
        value = tl.load(x + at.to(tl.int64) * token_stride + c, mask=inside & (at >= begin), other=0.0).to(tl.float32)
        kept = tl.load(tail + (slot + end - begin) * CHANNELS, mask=inside & (at < begin), other=0.0)
        tl.store(tail + slot * CHANNELS, tl.where(at < begin, kept, value), mask=inside & (place >= drafted))


TILE = 32  # tokens
MIN_DOT = 16


def recurrence_(
    q: torch.Tensor,  # the last two dimensions of q, k and v contiguous
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    matrices: torch.Tensor,  # the last three dimensions contiguous
    rows: StateRows,
    *,
    precision: str | None = None,
) -> torch.Tensor:
    """As the reference. Rows are distinct, apart from padding, which writes to page 0."""
    if rows.starts is None or decay.ndim == 3:
        return recurrence_by_tokens_(q, k, v, decay, beta, matrices, rows)
    if precision is None:  # most AMD devices know only this one
        precision = "ieee" if q.dtype == torch.float32 or torch.version.hip is not None else "tf32"
    tokens, heads, value_dim = v.shape
    key_dim, tiles = q.shape[2], triton.cdiv(tokens, TILE)
    decay, beta = decay.contiguous(), None if beta is None else beta.contiguous()
    shape = {
        "HEADS": heads, "SHARED": heads // q.shape[1], "KEY_DIM": key_dim, "TILE": TILE,
        "BLOCK_K": max(MIN_DOT, triton.next_power_of_2(key_dim)), "EPS": NORM_EPS, "PRECISION": precision,
    }  # fmt: skip
    inverses = None
    if beta is not None:
        inverses = torch.empty((tiles, heads, TILE, TILE), dtype=torch.float32, device=v.device)
        _invert[(tiles, heads)](k, decay, beta, inverses, tokens, k.stride(0), **shape, num_warps=4)
    block_v = min(triton.next_power_of_2(value_dim), 32 if key_dim <= 128 else MIN_DOT)
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    _recur_by_tiles[(len(rows.rows), heads, triton.cdiv(value_dim, block_v))](
        q, k, v, decay, beta, inverses, matrices, out, rows.table, rows.rows, rows.starts, rows.drafted,
        q.stride(0), k.stride(0), v.stride(0), matrices.stride(0), rows.table.stride(0),
        **shape, VALUE_DIM=value_dim, BLOCK_V=max(MIN_DOT, block_v), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def recurrence_by_tokens_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    matrices: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """The same one token after the other: a token's bits do not depend on where chunks end."""
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[2]
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(triton.next_power_of_2(value_dim), max(8, 4096 // block_k))
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    _recur[(len(rows.rows), heads, triton.cdiv(value_dim, block_v))](
        q, k, v, decay.contiguous(), None if beta is None else beta.contiguous(), matrices, out,
        rows.table, rows.rows, rows.starts, rows.drafted,
        q.stride(0), k.stride(0), v.stride(0), matrices.stride(0), rows.table.stride(0),
        HEADS=heads, SHARED=heads // q.shape[1], KEY_DIM=key_dim, VALUE_DIM=value_dim, BY_CHANNEL=decay.ndim == 3,
        BLOCK_K=block_k, BLOCK_V=block_v, EPS=NORM_EPS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["drafted"])
def _recur(
    q, k, v, decay, beta, matrices, out, table, rows, starts, drafted,
    q_stride, k_stride, v_stride, page_stride, table_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    place, head = tl.program_id(0), tl.program_id(1)
    begin, end = place, place + 1
    if starts is not None:
        begin, end = tl.load(starts + place), tl.load(starts + place + 1)
    if end <= begin:
        return
    d, e = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    page = tl.load(table + tl.load(rows + place).to(tl.int64) * table_stride).to(tl.int64)
    places = matrices + page * page_stride + (head * KEY_DIM + d[:, None]) * VALUE_DIM + e[None, :]
    inside = (d < KEY_DIM)[:, None] & (e < VALUE_DIM)[None, :]
    state = tl.load(places, mask=inside, other=0.0)
    for token in range(begin, end):
        t = tl.cast(token, tl.int64)
        of_key = (head // SHARED) * KEY_DIM + d
        query = tl.load(q + t * q_stride + of_key, mask=d < KEY_DIM, other=0.0).to(tl.float32)
        key = tl.load(k + t * k_stride + of_key, mask=d < KEY_DIM, other=0.0).to(tl.float32)
        value = tl.load(v + t * v_stride + head * VALUE_DIM + e, mask=e < VALUE_DIM, other=0.0).to(tl.float32)
        of_head = t * HEADS + head
        if BY_CHANNEL:
            state *= tl.exp(tl.load(decay + of_head * KEY_DIM + d, mask=d < KEY_DIM, other=0.0))[:, None]
        else:
            state *= tl.exp(tl.load(decay + of_head))
        if beta is not None:
            query *= tl.rsqrt(tl.sum(query * query) + EPS) * KEY_DIM**-0.5
            key *= tl.rsqrt(tl.sum(key * key) + EPS)
            known = tl.sum(key[:, None] * state, axis=0)
            value = (value - known) * tl.load(beta + of_head).to(tl.float32)
        state += key[:, None] * value[None, :]
        found = tl.sum(query[:, None] * state, axis=0)
        tl.store(out + of_head * VALUE_DIM + e, found.to(out.dtype.element_ty), mask=e < VALUE_DIM)
    tl.store(places, state, mask=inside & (place >= drafted))


@triton.jit
def _rows_of(x, stride, t, own, head, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Lines of a tile, 0 where they are not `own`. [TILE, BLOCK_K] float32"""
    d = tl.arange(0, BLOCK_K)
    places = x + t.to(tl.int64)[:, None] * stride + (head * KEY_DIM + d)[None, :]
    return tl.load(places, mask=own[:, None] & (d < KEY_DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _unit(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]


# `tokens` is left general: a step of another length must not wait for a kernel of its own.
@triton.jit(do_not_specialize=["tokens"])
def _invert(
    k, decay, beta, inverses, tokens, k_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one tile and head: what each token adds, of what those before it would have added."""
    tile, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, TILE)
    t = tile * TILE + i
    own = t < tokens
    keys = _unit(_rows_of(k, k_stride, t, own, head // SHARED, KEY_DIM, BLOCK_K), EPS)
    of_head = t.to(tl.int64) * HEADS + head
    # What is no number, of padding or of a row that fails, must not reach other rows of the tile.
    rates = tl.load(decay + of_head, mask=own, other=0.0)
    since = tl.cumsum(tl.where(tl.abs(rates) < float("inf"), rates, 0.0), axis=0)
    share = tl.load(beta + of_head, mask=own, other=0.0).to(tl.float32)
    earlier = i[:, None] > i[None, :]
    between = tl.exp(tl.where(earlier, since[:, None] - since[None, :], 0.0))
    products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * between * share[:, None]
    inverse = tl.where(earlier & (tl.abs(products) < float("inf")), -products, 0.0)
    for line in range(1, TILE):
        own_line = tl.sum(tl.where((i == line)[:, None], inverse, 0.0), axis=0)
        more = tl.sum(own_line[:, None] * inverse, axis=0)
        inverse += tl.where((i == line)[:, None], more[None, :], 0.0)
    inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    first = (tile.to(tl.int64) * HEADS + head) * TILE * TILE
    tl.store(inverses + first + i[:, None] * TILE + i[None, :], inverse)


@triton.jit(do_not_specialize=["drafted"])
def _recur_by_tiles(
    q, k, v, decay, beta, inverses, matrices, out, table, rows, starts, drafted,
    q_stride, k_stride, v_stride, page_stride, table_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    EPS: tl.constexpr, PRECISION: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    place, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + place), tl.load(starts + place + 1)
    if end <= begin:
        return
    d, e = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    page = tl.load(table + tl.load(rows + place).to(tl.int64) * table_stride).to(tl.int64)
    places = matrices + page * page_stride + (head * KEY_DIM + d[:, None]) * VALUE_DIM + e[None, :]
    inside = (d < KEY_DIM)[:, None] & (e < VALUE_DIM)[None, :]
    state = tl.load(places, mask=inside, other=0.0)
    i = tl.arange(0, TILE)
    upto = i[:, None] >= i[None, :]
    for tile in range(begin // TILE, (end + TILE - 1) // TILE):
        t = tile * TILE + i
        own = (t >= begin) & (t < end)
        queries = _rows_of(q, q_stride, t, own, head // SHARED, KEY_DIM, BLOCK_K)
        keys = _rows_of(k, k_stride, t, own, head // SHARED, KEY_DIM, BLOCK_K)
        here = own[:, None] & (e < VALUE_DIM)[None, :]
        of_value = t.to(tl.int64)[:, None] * v_stride + (head * VALUE_DIM + e)[None, :]
        values = tl.load(v + of_value, mask=here, other=0.0).to(tl.float32)
        of_head = t.to(tl.int64) * HEADS + head
        rates = tl.load(decay + of_head, mask=own, other=0.0)
        since, whole = tl.cumsum(rates, axis=0), tl.sum(rates, axis=0)
        if beta is not None:
            queries, keys = _unit(queries, EPS) * KEY_DIM**-0.5, _unit(keys, EPS)
            share = tl.load(beta + of_head, mask=own, other=0.0).to(tl.float32)
            known = tl.dot(keys, state, input_precision=PRECISION) * tl.exp(since)[:, None]
            first = (tl.cast(tile, tl.int64) * HEADS + head) * TILE * TILE
            both = own[:, None] & own[None, :]
            inverse = tl.load(inverses + first + i[:, None] * TILE + i[None, :], mask=both, other=0.0)
            values = tl.dot(inverse, share[:, None] * (values - known), input_precision=PRECISION)
        between = tl.exp(tl.where(upto, since[:, None] - since[None, :], 0.0))
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        products = tl.where(upto, products * between, 0.0)
        found = tl.dot(queries, state, input_precision=PRECISION) * tl.exp(since)[:, None]
        found = tl.dot(products, values, found, input_precision=PRECISION)
        of_out = of_head[:, None] * VALUE_DIM + e[None, :]
        tl.store(out + of_out, found.to(out.dtype.element_ty), mask=here)
        left = keys * tl.exp(whole - since)[:, None]
        state = tl.dot(tl.trans(left), values, state * tl.exp(whole), input_precision=PRECISION)
    tl.store(places, state, mask=inside & (place >= drafted))
