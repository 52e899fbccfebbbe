"""Attention over pages in plain torch: what the kernels are compared with, with their signatures.

`paged_attention` is written to be obviously right, one row, one head and one formula at a time: the truth that back
ends are compared with, in float64 if the caches are. None of it is made for serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    chunked: bool = False,  # the window is one of those that stand side by side
) -> torch.Tensor:
    """Causal attention of each row over its own pages, which already hold the queries' own keys and values."""
    out = torch.empty((*q.shape[:2], v_cache.shape[2]), dtype=q.dtype, device=q.device)
    group = q.shape[1] // k_cache.shape[1]
    for row, context in enumerate(context_lens):
        first, last = query_starts[row], query_starts[row + 1]
        length = context + last - first
        slots = [int(page_table[row, i // page_size]) * page_size + i % page_size for i in range(length)]
        mask = _visible(context, length, window, chunked)
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


def invariant_attention(
    q: torch.Tensor,  # [tokens, heads, head_dim], rows back to back
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim], the tokens' own keys included
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    query_starts: torch.Tensor,  # [batch + 1] int32
    lengths: torch.Tensor,  # [batch] int32, keys that the row's last query sees
    items: object | None = None,  # how to share out the work: not used here
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads] a logit without a value in each softmax
    k_scale: float = 1.0,  # what stored keys and values are multiplied with
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, heads, head_dim] in q's type, computed in q's type. It promises no equal bits."""
    out = torch.empty((*q.shape[:2], v_cache.shape[2]), dtype=q.dtype, device=q.device) if out is None else out
    for i, length in enumerate(lengths.tolist()):
        own = slice(int(query_starts[i]), int(query_starts[i + 1]))
        # Pages that no query sees may hold anything: behind a window they belong to other rows.
        first = 0 if window is None else max(0, length - (own.stop - own.start) - window + 1)
        slots = _slots(page_table[int(rows[i])], length, page_size)[first:]
        keys, values = k_cache[slots].to(q.dtype) * k_scale, v_cache[slots].to(q.dtype) * v_scale
        out[own] = _attend(q[own], keys, values, scale, window, softcap, sinks)
    return out


def decode_attention(
    q: torch.Tensor,  # [batch, heads, head_dim]
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    work: object | None = None,
    **options: Any,
) -> torch.Tensor:
    """`invariant_attention` of one query for each row."""
    starts = torch.arange(len(q) + 1)
    return invariant_attention(q, k_cache, v_cache, page_table, rows, starts, lengths, **options)


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
    blocks: object | None = None,  # how to share out the work: not used here
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads] a logit without a value in each softmax
    k_scale: float = 1.0,  # what stored keys and values are multiplied with
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, heads, head_dim] in q's type, computed in q's type."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for i, context in enumerate(context_lens.tolist()):
        own = slice(int(query_starts[i]), int(query_starts[i + 1]))
        slots = _slots(page_table[int(rows[i])], context, page_size)
        keys = torch.cat((k_cache[slots].to(q.dtype) * k_scale, k[own]))
        values = torch.cat((v_cache[slots].to(q.dtype) * v_scale, v[own]))
        out[own] = _attend(q[own], keys, values, scale, window, softcap, sinks)
    return out


def _slots(pages: torch.Tensor, count: int, page_size: int) -> torch.Tensor:
    """The slots of a row's first `count` tokens."""
    places = torch.arange(count, device=pages.device)
    return pages.long()[places // page_size] * page_size + places % page_size


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One row, whose last query sees its last key."""
    length, grouped = len(keys), q.reshape(len(q), keys.shape[1], -1, q.shape[2])
    scores = torch.einsum("mkgd,nkd->kgmn", grouped, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_visible(length - len(q), length, window).to(q.device), float("-inf"))
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(q.dtype).view(*scores.shape[:2], 1, 1))
    return torch.einsum("kgmn,nkd->mkgd", torch.exp(scores - total), values).flatten(1, 2)


def _visible(context: int, length: int, window: int | None, chunked: bool = False) -> torch.Tensor:
    """[queries, keys]: a query sees itself and what came before, at most `window` tokens in all."""
    query, key = torch.arange(context, length)[:, None], torch.arange(length)[None, :]
    seen = query >= key
    if window is None:
        return seen
    return seen & (query // window == key // window if chunked else query - key < window)
