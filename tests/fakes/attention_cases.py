"""Ragged batches over a scattered pool, and how far a back end's result is from the naive reference's.

Every slot of the pool starts as NaN, so reading what nobody wrote shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bough.attention.base import AttentionBackend, AttentionSpec
from bough.attention.batch import AttentionBatch
from bough.core.model_config import ModelConfig, RopeConfig
from bough.distributed.topology import Topology
from bough.memory.pools.kv_pool import KVPool
from tests.kernels.references.paged_attention import paged_attention

HEAD_DIM = 8


@dataclass(frozen=True)
class Case:
    """Rows as (tokens in the cache, new tokens)."""

    rows: tuple[tuple[int, int], ...]
    page_size: int = 1
    kv_heads: int = 2
    group: int = 3
    window: int | None = None
    softcap: float | None = None
    scattered: bool = True
    decodes: int = 0  # rows at the front that a back end is told to be decodes
    dtype: torch.dtype = torch.float32  # of the cache
    input_dtype: torch.dtype | None = None  # of the queries; None: the cache's
    sinks: bool = False
    chunked: bool = False


def error_of(case: Case, backend: AttentionBackend) -> float:
    """The largest difference between back end and reference; NaN where either read what nobody wrote."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    heads = case.kv_heads * case.group
    per_row = [-(-(context + new) // case.page_size) for context, new in case.rows]
    pool = make_pool(case, sum(per_row))
    pages = rng.permutation(sum(per_row)) if case.scattered else np.arange(sum(per_row))
    order = rng.permutation(len(case.rows) + 2)[: len(case.rows)]  # rows of the table, not in batch order
    table = torch.zeros(len(case.rows) + 2, max(per_row) + 1, dtype=torch.int32)
    taken = 0
    slots: list[int] = []
    positions: list[int] = []
    for row, count, (context, new) in zip(order, per_row, case.rows, strict=True):
        table[row, :count] = torch.from_numpy(pages[taken : taken + count] + 1)
        taken += count
        all_slots = [
            int(table[row, i // case.page_size]) * case.page_size + i % case.page_size for i in range(context + new)
        ]
        for cache in (pool.keys[0], pool.values[0]):
            cache[all_slots[:context]] = torch.randn(context, case.kv_heads, HEAD_DIM).to(case.dtype)
        slots += all_slots[context:]
        positions += range(context, context + new)

    query_lens = np.array([new for _, new in case.rows], dtype=np.int32)
    context_lens = np.array([context for context, _ in case.rows], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    batch = AttentionBatch(
        rows=torch.from_numpy(order.astype(np.int64)),
        lengths=torch.from_numpy(context_lens + query_lens),
        decodes=case.decodes,
        query_lens=query_lens,
        query_starts=starts,
        context_lens=context_lens,
        page_tables=(table,),
        slots=(torch.tensor(slots),),
        positions=torch.tensor(positions),
        page_size=case.page_size,
    )
    dtype = case.input_dtype or case.dtype
    q = torch.randn(len(slots), heads, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, len(slots), case.kv_heads, HEAD_DIM).to(dtype)
    sinks = torch.randn(heads) if case.sinks else None
    spec = AttentionSpec(
        0, 0.4, case.window, case.softcap, heads, case.kv_heads, HEAD_DIM, sinks=sinks, chunked=case.chunked
    )
    backend.prepare(batch)
    pool.keys[0][slots], pool.values[0][slots] = k.to(case.dtype), v.to(case.dtype)  # as the layer does first
    out = backend.run(q, k, v, spec, pool)
    assert out.shape == q.shape
    assert out.dtype == dtype
    truth = paged_attention(
        q.double(),
        pool.keys[0].double(),
        pool.values[0].double(),
        table[torch.from_numpy(order)],
        starts.tolist(),
        context_lens.tolist(),
        case.page_size,
        0.4,
        case.window,
        case.softcap,
        sinks,
        case.chunked,
    )
    return float((out.double() - truth).abs().max())


def make_pool(case: Case, pages: int) -> KVPool:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=case.kv_heads * case.group,
        num_kv_heads=case.kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=1,
        context_length=1,
        norm_eps=1e-5,
        rope=RopeConfig(1.0),
    )
    pool = KVPool(config, (pages,), case.page_size, case.dtype, torch.device("cpu"), Topology())
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(float("nan"))
    return pool
