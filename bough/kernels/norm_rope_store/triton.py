"""Head norms, rotation and the write to the caches in one launch: each value of a step is read and written once."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.kernels.overlap import overlap, take_turn


@dataclass(frozen=True, slots=True)
class HeadTiling:
    """How many heads of a token a program treats, and with how many warps."""

    heads: int
    num_warps: int


def config_for(tokens: int, heads: int, kv_heads: int, head_dim: int) -> HeadTiling:
    """Few heads per program while tokens are few, so that all of them are treated at once; 16-byte accesses always."""
    half = triton.next_power_of_2(head_dim // 2)
    together = max(1, (256 if tokens <= 64 else 512) // half)
    together = min(together, triton.next_power_of_2(max(heads, kv_heads)))
    return HeadTiling(together, num_warps=min(8, max(1, together * half // 256)))


def norm_rope_store_(
    qkv: torch.Tensor,  # [tokens, heads + 2 * kv_heads, head_dim], contiguous
    heads: int,
    kv_heads: int,  # 0: there are queries alone, and nothing is stored
    qk_norm_rope: QKNormRope,  # of whole heads, contiguous
    positions: torch.Tensor,  # [tokens] int64
    slots: torch.Tensor,  # [tokens] int64
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim], the last dimension contiguous
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim], with the strides of k_cache
    k_scale: float = 1.0,  # what readers multiply stored keys and values with, where caches have 8 bits
    v_scale: float = 1.0,
    *,
    config: HeadTiling | None = None,
) -> None:
    """Normalises query and key heads if they have a weight, rotates them, all in place, and stores keys and values."""
    tokens, _, head_dim = qkv.shape
    q_weight, k_weight, eps, plus_one, cos, sin = qk_norm_rope
    if tokens == 0:
        return
    tiling = config or config_for(tokens, heads, kv_heads, head_dim)
    eight_bits = k_cache.element_size() == 1
    query_blocks, key_blocks = triton.cdiv(heads, tiling.heads), triton.cdiv(kv_heads, tiling.heads)
    _norm_rope_store[(tokens, query_blocks + key_blocks)](
        qkv, q_weight, k_weight, eps, cos, sin, positions, slots, k_cache, v_cache, *k_cache.stride()[:2],
        1.0 / k_scale, 1.0 / v_scale,
        LARGEST=torch.finfo(k_cache.dtype).max if eight_bits else None, HEADS=heads, KV_HEADS=kv_heads,
        HALF=head_dim // 2, PLUS_ONE=plus_one, BLOCK_H=tiling.heads, BLOCK=triton.next_power_of_2(head_dim // 2),
        num_warps=tiling.num_warps, **overlap(tokens),
    )  # fmt: skip


@triton.jit
def _norm_rope_store(
    qkv, q_weight, k_weight, eps, cos, sin, positions, slots, k_cache, v_cache, slot_stride, head_stride,
    k_inverse_scale, v_inverse_scale,
    LARGEST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PLUS_ONE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program treats a block of query heads, or a block of key heads with the value heads of the same numbers."""
    take_turn(OVERLAP)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)[None, :]
    position = tl.load(positions + token)
    turn_cos = tl.load(cos + position * HALF + column, mask=column < HALF, other=0.0)
    turn_sin = tl.load(sin + position * HALF + column, mask=column < HALF, other=0.0)
    row = qkv + token * (HEADS + 2 * KV_HEADS) * 2 * HALF + column
    query_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    if block < query_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        here = (head < HEADS) & (column < HALF)
        turn(row + head * 2 * HALF, here, column, q_weight, eps, turn_cos, turn_sin, PLUS_ONE, HALF)
    else:
        head = (block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        here = (head < KV_HEADS) & (column < HALF)
        values = row + (HEADS + KV_HEADS + head) * 2 * HALF
        v_first, v_second = tl.load(values, mask=here), tl.load(values + HALF, mask=here)
        keys = row + (HEADS + head) * 2 * HALF
        k_first, k_second = turn(keys, here, column, k_weight, eps, turn_cos, turn_sin, PLUS_ONE, HALF)
        slot = tl.load(slots + token) * slot_stride + head * head_stride + column
        keep(k_cache + slot, k_first, k_inverse_scale, LARGEST, here)
        keep(k_cache + slot + HALF, k_second, k_inverse_scale, LARGEST, here)
        keep(v_cache + slot, v_first, v_inverse_scale, LARGEST, here)
        keep(v_cache + slot + HALF, v_second, v_inverse_scale, LARGEST, here)


@triton.jit
def keep(places, values, inverse_scale, LARGEST: tl.constexpr, here):
    """Stores values in the cache's type; LARGEST is its largest number where it has 8 bits. NaN stays NaN."""
    if LARGEST is not None:
        scaled = values.to(tl.float32) * inverse_scale
        values = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(places, values.to(places.dtype.element_ty), mask=here)


@triton.jit
def turn(heads, here, column, weight, eps, turn_cos, turn_sin, PLUS_ONE: tl.constexpr, HALF: tl.constexpr):
    """Normalises, if there is a weight, and rotates the heads whose first halves stand at `heads`, in place; returns
    their two halves."""
    first = tl.load(heads, mask=here, other=0.0)
    second = tl.load(heads + HALF, mask=here, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if weight is not None:
        scale_a = tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        scale_b = tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
        if PLUS_ONE:
            scale_a += 1.0
            scale_b += 1.0
        inverse = tl.rsqrt(tl.sum(a * a + b * b, axis=1, keep_dims=True) / (2 * HALF) + eps)
        a = (a * inverse * scale_a).to(first.dtype).to(tl.float32)
        b = (b * inverse * scale_b).to(first.dtype).to(tl.float32)
    turned_a = (a * turn_cos - b * turn_sin).to(first.dtype)
    turned_b = (b * turn_cos + a * turn_sin).to(first.dtype)
    tl.store(heads, turned_a, mask=here)
    tl.store(heads + HALF, turned_b, mask=here)
    return turned_a, turned_b
