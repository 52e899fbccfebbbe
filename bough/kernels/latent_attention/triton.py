"""What is particular to latent attention, in Triton: the store of latents, the products that lead queries to latents
and results back, and attention over keys and values that were made of latents.

Attention over latents themselves is `decode_attention`'s, or `invariant_attention`'s.
"""

import torch
import triton
import triton.language as tl

from bough.kernels.norm_rope_store.triton import keep, turn
from bough.kernels.overlap import overlap, take_turn
from bough.kernels.prefill_attention.triton import LOG2_E, PrefillConfig, fetch
from bough.kernels.shared_memory import LITTLE, PLENTY, shared_bytes

MIN_DOT = 16  # the smallest matrix that tl.dot takes
HEADS_AT_ONCE = 8  # whose ends a program rotates


def latent_store_(
    q: torch.Tensor,  # [tokens, heads, nope_dim + rope_dim], the last two dimensions contiguous
    latents: torch.Tensor,  # [tokens, rank + rope_dim], the last dimension contiguous
    weight: torch.Tensor,  # [rank]
    eps: float,
    cos: torch.Tensor,  # [context, rope_dim / 2] float32, contiguous
    sin: torch.Tensor,  # [context, rope_dim / 2] float32, contiguous
    positions: torch.Tensor,  # [tokens] int64
    slots: torch.Tensor,  # [tokens] int64
    cache: torch.Tensor,  # [slots, 1, rank + rope_dim], contiguous
    scale: float = 1.0,  # what readers multiply stored numbers with, where the cache has 8 bits
) -> None:
    """Normalises the latents, rotates the end of each of them and of each query head, all in place, and stores the
    latents."""
    tokens, heads, head_dim = q.shape
    if tokens == 0:
        return
    rank, half = len(weight), cos.shape[1]
    largest = torch.finfo(cache.dtype).max if cache.element_size() == 1 else None
    _store[(tokens, 1 + triton.cdiv(heads, HEADS_AT_ONCE))](
        q, latents, weight, eps, cos, sin, positions, slots, cache, q.stride(0), latents.stride(0), 1.0 / scale,
        LARGEST=largest, HEADS=heads, HEAD_DIM=head_dim, RANK=rank, HALF=half, BLOCK_H=HEADS_AT_ONCE,
        BLOCK_R=triton.next_power_of_2(rank), BLOCK=triton.next_power_of_2(half),
        num_warps=4, **overlap(tokens),
    )  # fmt: skip


@triton.jit
def _store(
    q, latents, weight, eps, cos, sin, positions, slots, cache, q_stride, latent_stride, inverse_scale,
    LARGEST: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The first program of a token has its latent, the others have some of its query heads."""
    take_turn(OVERLAP)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)[None, :]
    position = tl.load(positions + token)
    turn_cos = tl.load(cos + position * HALF + column, mask=column < HALF, other=0.0)
    turn_sin = tl.load(sin + position * HALF + column, mask=column < HALF, other=0.0)
    if block > 0:
        head = (block - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        ends = q + token * q_stride + head * HEAD_DIM + (HEAD_DIM - 2 * HALF) + column
        turn(ends, (head < HEADS) & (column < HALF), column, None, 0.0, turn_cos, turn_sin, False, HALF)
    else:
        line = latents + token * latent_stride
        kept = cache + tl.load(slots + token) * (RANK + 2 * HALF)
        d = tl.arange(0, BLOCK_R)[None, :]
        values = tl.load(line + d, mask=d < RANK, other=0.0)
        wide = values.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / RANK + eps)
        normed = (wide * tl.load(weight + d, mask=d < RANK, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(line + d, normed, mask=d < RANK)
        first, second = turn(line + RANK + column, column < HALF, column, None, 0.0, turn_cos, turn_sin, False, HALF)
        keep(kept + d, normed, inverse_scale, LARGEST, d < RANK)
        keep(kept + RANK + column, first, inverse_scale, LARGEST, column < HALF)
        keep(kept + RANK + HALF + column, second, inverse_scale, LARGEST, column < HALF)


def absorb(
    q: torch.Tensor,  # [tokens, heads, nope_dim + rope_dim], the last dimension contiguous
    weight: torch.Tensor,  # [heads, nope_dim + value_dim, rank], contiguous
    nope_dim: int,
    *,
    block_t: int | None = None,  # tokens of a tile, on which the bits of the result may depend
) -> torch.Tensor:
    """Queries that attend to latents. [tokens, heads, rank + rope_dim]"""
    tokens, heads, width = q.shape
    rank, rope_dim = weight.shape[2], width - nope_dim
    out = torch.empty((tokens, heads, rank + rope_dim), dtype=q.dtype, device=q.device)
    return _by_head(q, weight[:, :nope_dim], out, rope_dim, block_t)


def lift(
    attended: torch.Tensor,  # [tokens, heads, rank], the last dimension contiguous
    weight: torch.Tensor,  # [heads, nope_dim + value_dim, rank], contiguous
    nope_dim: int,
    *,
    out: torch.Tensor | None = None,  # [tokens, heads, value_dim], the last dimension contiguous
    block_t: int | None = None,
) -> torch.Tensor:
    """Of sums of latents, the sums of the values that are made of these. [tokens, heads, value_dim]"""
    if out is None:
        shape = (*attended.shape[:2], weight.shape[1] - nope_dim)
        out = torch.empty(shape, dtype=attended.dtype, device=attended.device)
    return _by_head(attended, weight[:, nope_dim:].transpose(1, 2), out, 0, block_t)


def _by_head(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, extra: int, block_t: int | None) -> torch.Tensor:
    """out[t, h] = x[t, h] @ weight[h]; `extra` columns behind those of x that are multiplied follow unchanged."""
    tokens, heads = x.shape[:2]
    _, inputs, outputs = weight.shape
    if tokens == 0:
        return out
    block_t = block_t or (MIN_DOT if tokens <= 64 else 64)
    # Of few tokens, weights are all there is to read: by as many programs as keep the device busy, and all at once.
    block_k = min(128 if block_t > MIN_DOT else 512, max(MIN_DOT, triton.next_power_of_2(inputs)))
    block_n = 64 if block_t > MIN_DOT else 32 if outputs > 256 else 16
    _product[(triton.cdiv(outputs, block_n), heads, triton.cdiv(tokens, block_t))](
        x, weight, out, tokens, *x.stride()[:2], *weight.stride(), *out.stride()[:2],
        K=inputs, N=outputs, EXTRA=extra, BLOCK_T=block_t, BLOCK_K=block_k, BLOCK_N=block_n,
        BLOCK_E=triton.next_power_of_2(max(extra, 1)),
        num_warps=4, num_stages=3, **overlap(tokens),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _product(
    x, weight, out, tokens, x_token_stride, x_head_stride, w_head_stride, w_k_stride, w_n_stride, out_token_stride,
    out_head_stride,
    K: tl.constexpr, N: tl.constexpr, EXTRA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    places = weight + head * w_head_stride + k[:, None] * w_k_stride + n[None, :] * w_n_stride
    right = tl.load(places, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    take_turn(OVERLAP)  # the first weights are already on their way
    token = (tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    here = (token < tokens)[:, None]
    rows = x + token[:, None] * x_token_stride + head * x_head_stride
    target = out + token[:, None] * out_token_stride + head * out_head_stride
    left = tl.load(rows + k[None, :], mask=here & (k < K)[None, :], other=0.0)
    acc = tl.dot(left, right, input_precision="ieee")
    for start in range(BLOCK_K, K, BLOCK_K):
        inside = k < K - start
        left = tl.load(rows + start + k[None, :], mask=here & inside[None, :], other=0.0)
        right = tl.load(places + start * w_k_stride, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(target + n[None, :], acc.to(out.dtype.element_ty), mask=here & (n < N)[None, :])
    if EXTRA:  # noqa: SIM102  (decided when the kernel is compiled)
        if tl.program_id(0) == 0:
            e = tl.arange(0, BLOCK_E)[None, :]
            kept = tl.load(rows + K + e, mask=here & (e < EXTRA), other=0.0)
            tl.store(target + N + e, kept, mask=here & (e < EXTRA))


def config_for(dtype: torch.dtype, *, room: int | None = None) -> PrefillConfig:
    """For heads of about 192 numbers. `room` is the shared memory of a program, in bytes; this machine's when left
    out."""
    room = shared_bytes() if room is None else room
    if dtype.itemsize > 2:  # no tensor cores: the products are unrolled, and larger tiles would spill
        return PrefillConfig(block_m=32, block_n=16, pack=1, num_warps=8, num_stages=2)
    if room <= LITTLE:
        return PrefillConfig(block_m=64, block_n=32, pack=1, num_warps=4, num_stages=2)
    return PrefillConfig(block_m=128, block_n=64, pack=1, num_warps=8, num_stages=2 if room < PLENTY else 3)


def expanded_attention(
    q: torch.Tensor,  # [tokens, heads, nope_dim + rope_dim], the last dimension contiguous
    made: torch.Tensor,  # [keys, heads, nope_dim + value_dim], contiguous: keys and values made of latents
    shared: torch.Tensor,  # [keys, rope_dim], the last dimension contiguous: the keys' ends, which all heads share
    query_starts: torch.Tensor,  # [batch + 1] int32
    key_starts: torch.Tensor,  # [batch] int32, where in `made` each row's keys begin, those of cached tokens first
    context_lens: torch.Tensor,  # [batch] int32, the row's keys before its queries
    blocks: torch.Tensor,  # [blocks, 2] int32, of `query_blocks` with the config's block_m
    *,
    scale: float,
    out: torch.Tensor,  # [tokens, heads, value_dim], the last dimension contiguous
    config: PrefillConfig | None = None,
) -> None:
    """Causal attention of the rows that the blocks name, accumulated in float32, written to their places in `out`."""
    heads, rope_dim, value_dim = made.shape[1], shared.shape[1], out.shape[2]
    nope_dim = made.shape[2] - value_dim
    chosen = config or config_for(q.dtype)
    assert q.stride(2) == out.stride(2) == shared.stride(1) == 1
    assert made.is_contiguous()
    _attend[(heads, blocks.shape[0])](
        q, made, shared, query_starts, key_starts, context_lens, blocks, out, *q.stride()[:2], made.stride(0),
        shared.stride(0), *out.stride()[:2], scale * LOG2_E,
        NOPE=nope_dim, ROPE=rope_dim, VALUE=value_dim, BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n,
        BLOCK_D=triton.next_power_of_2(nope_dim), BLOCK_E=max(MIN_DOT, triton.next_power_of_2(rope_dim)),
        BLOCK_V=triton.next_power_of_2(value_dim),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip


# The heads of a block are neighbours in the grid: they read the same shared keys.
@triton.jit
def _attend(
    q, made, shared, query_starts, key_starts, context_lens, blocks, out,
    q_token_stride: int, q_head_stride: int, made_stride: int, shared_stride: int, out_token_stride: int,
    out_head_stride: int, scale: float,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One block of queries, for one head."""
    head, block = tl.program_id(0), tl.program_id(1)
    place, first = tl.load(blocks + block * 2), tl.load(blocks + block * 2 + 1)
    row_start = tl.load(query_starts + place)
    queries = tl.load(query_starts + place + 1) - row_start
    context = tl.load(context_lens + place)
    key_start = tl.load(key_starts + place).to(tl.int64)

    query = first + tl.arange(0, BLOCK_M)
    d, e, v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_V)
    there = (query < queries)[:, None]
    token = row_start.to(tl.int64) + query
    rows = q + token[:, None] * q_token_stride + head * q_head_stride
    own = tl.load(rows + d[None, :], mask=there & (d < NOPE)[None, :], other=0.0)
    turned = tl.load(rows + NOPE + e[None, :], mask=there & (e < ROPE)[None, :], other=0.0)

    made += key_start * made_stride + head * (NOPE + VALUE)
    shared += key_start * shared_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Blocks of keys that the first query sees whole, then the rest.
    common = (context + first + 1) // BLOCK_N * BLOCK_N
    end = context + tl.minimum(first + BLOCK_M, queries)
    for masked in tl.static_range(2):
        begin = common if masked else 0
        stop = end if masked else common
        for start in range(begin, stop, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            held = key < end
            line = made + key[:, None].to(tl.int64) * made_stride
            ends = shared + key[:, None] * shared_stride
            k = fetch(line + d[None, :], held, masked, NOPE, BLOCK_D)
            more = fetch(ends + e[None, :], held, masked, ROPE, BLOCK_E)
            value = fetch(line + NOPE + v[None, :], held, masked, VALUE, BLOCK_V)
            scores = tl.dot(own, tl.trans(k), input_precision="ieee")
            scores = tl.dot(turned, tl.trans(more), scores, input_precision="ieee") * scale
            if masked:
                scores = tl.where(context + query[:, None] >= key[None, :], scores, float("-inf"))
            # A row sees its first key, so `new_top` is finite.
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            norm = norm * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
            top = new_top
    target = out + token[:, None] * out_token_stride + head * out_head_stride + v[None, :]
    tl.store(target, (acc / norm[:, None]).to(out.dtype.element_ty), mask=there & (v < VALUE)[None, :])
