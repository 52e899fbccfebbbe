"""Storing keys and values in plain torch."""

from __future__ import annotations

import torch


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
        if cache.dtype.itemsize > 1:
            cache.index_copy_(0, slots, values.to(cache.dtype))
        else:
            # Bytes, because torch cannot index float8 on every device.
            cache.view(torch.uint8).index_copy_(0, slots, to_fp8(values, scale, cache.dtype).view(torch.uint8))


def to_fp8(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """values / scale; what is too large for the type becomes its largest number."""
    largest = torch.finfo(dtype).max
    return (values.float() * (1.0 / scale)).clamp_(-largest, largest).to(dtype)
