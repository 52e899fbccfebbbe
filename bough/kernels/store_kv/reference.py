"""Storing keys and values in plain torch."""

from __future__ import annotations

import torch


def store_kv(
    k: torch.Tensor,  # [tokens, kv_heads, head_dim]
    v: torch.Tensor,  # [tokens, kv_heads, head_dim]
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    slots: torch.Tensor,  # [tokens] int64
) -> None:
    """Writes token i, already in the cache's type, to slot `slots[i]`. Slots that occur twice hold either token."""
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)
