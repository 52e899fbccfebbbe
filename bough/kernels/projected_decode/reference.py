"""Decode attention from the projection, composed of the two operations that it stands for."""

from __future__ import annotations

import torch

from bough.kernels.decode_attention.reference import decode_attention
from bough.kernels.norm_rope_store.reference import norm_rope_store_


def projected_decode(
    qkv: torch.Tensor,  # [batch, heads + 2 * kv_heads, head_dim], contiguous
    heads: int,
    kv_heads: int,
    q_weight: torch.Tensor | None,  # [head_dim]
    k_weight: torch.Tensor | None,  # [head_dim]
    eps: float,
    plus_one: bool,
    cos: torch.Tensor,  # [context, head_dim / 2] float32
    sin: torch.Tensor,  # [context, head_dim / 2] float32
    positions: torch.Tensor,  # [batch] int64
    slots: torch.Tensor,  # [batch] int64
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    lengths: torch.Tensor,  # [batch] int32, keys the row's query sees, its own included
    work: object | None,  # how to share out the work: not used here
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """[batch, heads, head_dim]: the queries, normalised and rotated, over the cached keys and the row's new one, which
    is stored. No row may see what another one stores. `qkv` is changed or not, as is convenient."""
    norm_rope_store_(
        qkv, heads, kv_heads, q_weight, k_weight, eps, plus_one, cos, sin, positions, slots, k_cache, v_cache
    )  # fmt: skip
    return decode_attention(
        qkv[:, :heads], k_cache, v_cache, page_table, rows, lengths, None,
        page_size=page_size, scale=scale, window=window, softcap=softcap,
    )  # fmt: skip
