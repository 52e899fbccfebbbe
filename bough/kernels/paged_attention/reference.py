"""Paged attention, written to be obviously right: one row, one head and one formula at a time.

This is the truth that back ends are compared with, in float64 if the caches are. It is not made for serving.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def paged_attention(
    q: torch.Tensor,  # [tokens, heads, head_dim], rows back to back
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    page_table: torch.Tensor,  # [batch, pages]
    query_starts: Sequence[int],  # [batch + 1]
    context_lens: Sequence[int],  # [batch] tokens in the cache before the queries
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads] a logit without a value in each softmax
) -> torch.Tensor:
    """Causal attention of each row over its own pages, which already hold the queries' own keys and values."""
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[1]
    for row, context in enumerate(context_lens):
        first, last = query_starts[row], query_starts[row + 1]
        length = context + last - first
        slots = [int(page_table[row, i // page_size]) * page_size + i % page_size for i in range(length)]
        mask = _visible(context, length, window)
        for head in range(q.shape[1]):
            scores = q[first:last, head] @ k_cache[slots, head // group].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~mask.to(q.device), float("-inf"))
            total = torch.logsumexp(scores, dim=-1, keepdim=True)
            if sinks is not None:
                total = torch.logaddexp(total, sinks[head].to(total.dtype))
            out[first:last, head] = torch.exp(scores - total) @ v_cache[slots, head // group]
    return out


def _visible(context: int, length: int, window: int | None) -> torch.Tensor:
    """[queries, keys]: a query sees itself and what came before, at most `window` tokens in all."""
    distance = torch.arange(context, length)[:, None] - torch.arange(length)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
