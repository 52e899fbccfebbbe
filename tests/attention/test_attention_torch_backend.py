"""The torch back end against the naive reference, over ragged batches, page sizes, windows, caps and types."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.attention import torch_backend
from bough.attention.base import AttentionSpec
from bough.attention.batch import AttentionBatch
from bough.attention.registry import build_backend
from bough.core.errors import SettingsError
from bough.core.model_config import ModelConfig, RopeConfig
from bough.distributed.topology import Topology
from bough.kernels.paged_attention.reference import paged_attention
from bough.memory.pools.kv_pool import KVPool

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
    dtype: torch.dtype = torch.float32  # of the cache
    input_dtype: torch.dtype | None = None  # of the queries; None: the cache's


def error_of(case: Case) -> float:
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
        decodes=0,
        query_lens=query_lens,
        query_starts=starts,
        context_lens=context_lens,
        page_table=table,
        slots=torch.tensor(slots),
        positions=torch.tensor(positions),
        page_size=case.page_size,
    )
    dtype = case.input_dtype or case.dtype
    q = torch.randn(len(slots), heads, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, len(slots), case.kv_heads, HEAD_DIM).to(dtype)
    spec = AttentionSpec(0, 0.4, case.window, case.softcap, heads, case.kv_heads, HEAD_DIM)
    backend = build_backend("torch")
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
    pool = KVPool(config, pages, case.page_size, case.dtype, torch.device("cpu"), Topology())
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(float("nan"))
    return pool


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "rows",
    [
        ((0, 1),),  # the first token of all
        ((17, 1),),
        ((0, 20),),
        ((13, 1), (4, 1), (9, 1)),  # one padded group
        ((700, 1), (3, 1), (600, 1), (5, 1)),  # two groups, interleaved
        ((30, 1), (0, 1), (12, 7), (0, 9), (400, 3)),  # decodes and prefills mixed
        ((20, 600), (0, 257)),  # prefills of several query blocks, with and without a cached prefix
    ],
)
def test_equals_the_reference(rows: tuple[tuple[int, int], ...], window: int | None, softcap: float | None) -> None:
    assert error_of(Case(rows, window=window, softcap=softcap)) < 1e-5
    assert error_of(Case(rows, page_size=16, window=window, softcap=softcap, scattered=False)) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_16_bit_caches(dtype: torch.dtype, tolerance: float, softcap: float | None) -> None:
    case = Case(((30, 1), (3, 1), (12, 7), (0, 9)), page_size=4, dtype=dtype, softcap=softcap)
    assert error_of(case) < tolerance
    assert error_of(replace(case, input_dtype=torch.float32)) < tolerance


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), min_size=1, max_size=6),
    lone_queries=st.booleans(),
    page_size=st.sampled_from([1, 3, 16]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 4]),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(1.5),
    scattered=st.booleans(),
    block=st.sampled_from([4, 256]),
)
def test_any_batch_equals_the_reference(
    rows: list[tuple[int, int]],
    lone_queries: bool,
    page_size: int,
    kv_heads: int,
    group: int,
    window: int | None,
    softcap: float | None,
    scattered: bool,
    block: int,
) -> None:
    shape = tuple((context, 1) for context, _ in rows) if lone_queries else tuple(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "QUERY_BLOCK", block)
        assert error_of(Case(shape, page_size, kv_heads, group, window, softcap, scattered)) < 1e-5


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'flash9'; choose one of: .*torch"):
        build_backend("flash9")
