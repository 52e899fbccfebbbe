"""Decode attention in plain torch, row by row: what the fast kernels are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bough.kernels.decode_attention.work import DecodeWork


def decode_attention(
    q: torch.Tensor,  # [batch, heads, head_dim]
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    lengths: torch.Tensor,  # [batch] int32, keys the row's query sees, its own included
    work: DecodeWork | None,  # how to share out the work: not used here
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,  # what stored keys and values are multiplied with
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    config: object | None = None,
) -> torch.Tensor:
    """[batch, heads, head_dim] in q's type, computed in q's type."""
    batch, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    if out is None:
        out = q.new_empty((batch, heads, head_dim))
    for i in range(batch):
        length = int(lengths[i])
        first = 0 if window is None else max(0, length - window)
        keys = torch.arange(first, length, device=q.device)
        slots = page_table[int(rows[i])].long()[keys // page_size] * page_size + keys % page_size
        k = k_cache[slots].to(q.dtype) * k_scale
        v = v_cache[slots].to(q.dtype) * v_scale
        grouped = q[i].reshape(kv_heads, heads // kv_heads, head_dim)
        scores = torch.einsum("hgd,nhd->hgn", grouped, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[i] = torch.einsum("hgn,nhd->hgd", torch.softmax(scores, dim=-1), v).reshape(heads, head_dim)
    return out
