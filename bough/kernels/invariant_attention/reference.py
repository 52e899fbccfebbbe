"""The same attention in plain torch, row by row: what the fast kernel is compared with. It promises no equal bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bough.kernels.invariant_attention.work import Partials


def invariant_attention(
    q: torch.Tensor,  # [tokens, heads, head_dim], rows back to back
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim], the tokens' own keys included
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    query_starts: torch.Tensor,  # [batch + 1] int32
    lengths: torch.Tensor,  # [batch] int32, keys that the row's last query sees
    items: torch.Tensor | None,  # how to share out the work: not used here
    *,
    programs: int = 1,
    partials: Partials | None = None,
    split_rows: int = 0,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,  # what stored keys and values are multiplied with
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    config: object | None = None,
) -> torch.Tensor:
    """[tokens, heads, head_dim] in q's type, computed in q's type."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // k_cache.shape[1]
    for i, length in enumerate(lengths.tolist()):
        first, last = int(query_starts[i]), int(query_starts[i + 1])
        key = torch.arange(length, device=q.device)
        slots = page_table[int(rows[i])].long()[key // page_size] * page_size + key % page_size
        keys = (k_cache[slots].to(q.dtype) * k_scale).repeat_interleave(group, dim=1)
        values = (v_cache[slots].to(q.dtype) * v_scale).repeat_interleave(group, dim=1)
        scores = torch.einsum("mhd,nhd->hmn", q[first:last], keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = key[length - (last - first) :, None] - key[None, :]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
        out[first:last] = torch.einsum("hmn,nhd->mhd", weights, values)
    return out
