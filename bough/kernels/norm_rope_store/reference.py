"""What stands between the projection of a step and its attention, composed of the plain operations."""

from __future__ import annotations

import torch

from bough.kernels.rms_norm.reference import rms_norm
from bough.kernels.rope.reference import angles_of, apply_rope
from bough.kernels.store_kv.reference import store_kv


def norm_rope_store_(
    qkv: torch.Tensor,  # [tokens, heads + 2 * kv_heads, head_dim], contiguous
    heads: int,
    kv_heads: int,
    q_weight: torch.Tensor | None,  # [head_dim]
    k_weight: torch.Tensor | None,  # [head_dim]
    eps: float,
    plus_one: bool,
    cos: torch.Tensor,  # [context, rotary_dim / 2] float32
    sin: torch.Tensor,  # [context, rotary_dim / 2] float32
    positions: torch.Tensor,  # [tokens] int64, or [axes, tokens]
    slots: torch.Tensor,  # [tokens] int64
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    k_scale: float = 1.0,  # what readers multiply stored keys and values with, where caches have 8 bits
    v_scale: float = 1.0,
    axes: torch.Tensor | None = None,  # [rotary_dim / 2] int64, by which of a token's positions each pair rotates
) -> None:
    """Normalises query and key heads if they have a weight, rotates them, all in place, and stores keys and values.

    Kernels for devices rotate whole heads by one position. Layers that rotate a part of each head, not at all, or by
    several positions call this function on every device.

    The normalised heads are rounded to the type of `qkv` before they are rotated, and keys and values to the type of
    the caches as they are stored; those that are too large for 8 bits become the largest number there is.
    """
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    for part, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            part.copy_(rms_norm(part, weight, eps, plus_one=plus_one)[0])
    qk = qkv[:, : heads + kv_heads]  # both at once: on a CPU each operation costs more than its arithmetic
    qk.copy_(apply_rope(qk, *angles_of(cos, sin, positions, axes)))
    store_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale)
