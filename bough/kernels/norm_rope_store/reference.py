"""What stands between the projection of a step and its attention, composed of the plain operations."""

from typing import NamedTuple

import torch

from bough.kernels.rms_norm.reference import rms_norm


class QKNormRope(NamedTuple):
    """What is done to the query and key heads of one layer before they attend: a norm, if they have one, and the
    rotation by their positions."""

    query_weight: torch.Tensor | None  # [head_dim], or [heads * head_dim] for a norm of all heads at once
    key_weight: torch.Tensor | None  # [head_dim], or [kv_heads * head_dim]
    eps: float
    plus_one: bool  # the norms multiply with 1 + weight
    cos: torch.Tensor  # [context, rotary_dim / 2] float32
    sin: torch.Tensor  # [context, rotary_dim / 2] float32


def angles_of(
    cos: torch.Tensor,  # [context, rotary_dim / 2] float32
    sin: torch.Tensor,  # [context, rotary_dim / 2] float32
    positions: torch.Tensor,  # [tokens] int64, or [axes, tokens]
    axes: torch.Tensor | None = None,  # [rotary_dim / 2] int64, by which of a token's positions each pair rotates
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `apply_rope` takes, for each token. [tokens, 1, rotary_dim] each"""
    if positions.dim() == 1:
        c, s = cos[positions, None], sin[positions, None]
    else:
        assert axes is not None, "positions with several axes need a rotation that tells which pair takes which"
        places = (positions[axes].T, torch.arange(len(axes), device=axes.device))
        c, s = cos[places][:, None], sin[places][:, None]
    return torch.cat((c, c), dim=-1), torch.cat((-s, s), dim=-1)


def apply_rope(
    x: torch.Tensor,  # [tokens, heads, head_dim]
    cos: torch.Tensor,  # [tokens, 1, rotary_dim]
    signed_sin: torch.Tensor,  # [tokens, 1, rotary_dim], the first half negated
) -> torch.Tensor:
    """Rotates each pair (i, i + rotary_dim / 2) by its angle; coordinates behind `rotary_dim` stay as they are.

    The sign of the rotation lives in `signed_sin`, so that one multiplication serves both halves. Angles in float32
    make the arithmetic float32 whatever the type of `x`.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :rotary_dim], cos, signed_sin), x[..., rotary_dim:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    turned = (swapped * signed_sin).addcmul_(x, cos)
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)


def store_kv(
    k: torch.Tensor,  # [tokens, kv_heads, head_dim]
    v: torch.Tensor,  # [tokens, kv_heads, head_dim]
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    slots: torch.Tensor,  # [tokens] int64
    k_scale: float = 1.0,  # what readers multiply stored keys and values with, where caches have 8 bits
    v_scale: float = 1.0,
) -> None:
    """Writes token i to slot `slots[i]`, in the cache's type. Slots that occur twice hold either token."""
    for values, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        keep(values, cache, slots, scale)


def keep(values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
    """Writes values / scale where the cache has 8 bits; what is too large for them becomes their largest number."""
    if cache.dtype.itemsize > 1:
        cache.index_copy_(0, slots, values.to(cache.dtype))
    else:
        largest = torch.finfo(cache.dtype).max
        small = (values.float() * (1.0 / scale)).clamp_(-largest, largest).to(cache.dtype)
        # Bytes, because torch cannot index float8 on every device.
        cache.view(torch.uint8).index_copy_(0, slots, small.view(torch.uint8))


def norm_rope_store_(
    qkv: torch.Tensor,  # [tokens, heads + 2 * kv_heads, head_dim], contiguous
    heads: int,
    kv_heads: int,  # 0: there are queries alone, and nothing is stored
    qk_norm_rope: QKNormRope,
    positions: torch.Tensor,  # [tokens] int64, or [axes, tokens]
    slots: torch.Tensor,  # [tokens] int64
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    k_scale: float = 1.0,  # what readers multiply stored keys and values with, where caches have 8 bits
    v_scale: float = 1.0,
    axes: torch.Tensor | None = None,  # [rotary_dim / 2] int64, by which of a token's positions each pair rotates
    norm_last: bool = False,  # the norms follow the rotation
) -> None:
    """Normalises query and key heads if they have a weight, rotates them, all in place, and stores keys and values.

    Kernels for devices rotate whole heads by one position, after norms of single heads. Layers that do otherwise call
    this function on every device.

    The normalised heads are rounded to the type of `qkv` before they are rotated, and keys and values to the type of
    the caches as they are stored; those that are too large for 8 bits become the largest number there is.
    """
    q_weight, k_weight, eps, plus_one, cos, sin = qk_norm_rope
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    qk = qkv[:, : heads + kv_heads]  # both at once: on a CPU each operation costs more than its arithmetic
    rotates = cos.shape[1] > 0
    if norm_last and rotates:
        qk.copy_(apply_rope(qk, *angles_of(cos, sin, positions, axes)))
    for part, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            rows = part.reshape(len(part), -1, weight.numel())
            part.copy_(rms_norm(rows, weight, eps, plus_one=plus_one)[0].view(part.shape))
    if rotates and not norm_last:
        qk.copy_(apply_rope(qk, *angles_of(cos, sin, positions, axes)))
    if kv_heads:
        store_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale)
