"""Prefill attention in plain torch, row by row: what the fast kernels are compared with."""

from __future__ import annotations

import torch


def prefill_attention(
    q: torch.Tensor,  # [tokens, heads, head_dim], rows back to back
    k: torch.Tensor,  # [tokens, kv_heads, head_dim], of the same tokens
    v: torch.Tensor,  # [tokens, kv_heads, head_dim]
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    query_starts: torch.Tensor,  # [batch + 1] int32
    context_lens: torch.Tensor,  # [batch] int32, tokens of the row in the cache
    blocks: torch.Tensor | None,  # how to share out the work: not used here
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
    """[tokens, heads, head_dim] in q's type, computed in q's type."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    for i, context in enumerate(context_lens.tolist()):
        first, last = int(query_starts[i]), int(query_starts[i + 1])
        cached = torch.arange(context, device=q.device)
        slots = page_table[int(rows[i])].long()[cached // page_size] * page_size + cached % page_size
        keys = torch.cat((k_cache[slots].to(q.dtype) * k_scale, k[first:last]))
        values = torch.cat((v_cache[slots].to(q.dtype) * v_scale, v[first:last]))
        scores = torch.einsum("mhd,nhd->hmn", q[first:last], keys.repeat_interleave(group, dim=1)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~_visible(context, last - first, window).to(q.device), float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out[first:last] = torch.einsum("hmn,nhd->mhd", weights, values.repeat_interleave(group, dim=1))
    return out


def _visible(context: int, queries: int, window: int | None) -> torch.Tensor:
    """[queries, keys]: a query sees itself and what came before, at most `window` tokens in all."""
    distance = torch.arange(context, context + queries)[:, None] - torch.arange(context + queries)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
