"""Prefill attention against the reference in float64, and the blocks that make up its grid.

Triton's interpreter multiplies bfloat16 matrices as if they were integers: that type is tested on a GPU only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.kernels.prefill_attention import triton as fast
from bough.kernels.prefill_attention.triton import blocks_together, query_blocks
from tests.kernels.closeness import assert_near
from tests.kernels.references import paged_attention as reference
from tests.kernels.references.paged_attention import paged_attention

SMALL = fast.PrefillConfig(block_m=32, block_n=16, pack=2, num_warps=4, num_stages=2)


@dataclass
class Case:
    """A step's inputs; q, k and v are parts of one tensor, and slots that hold no prefix hold NaN."""

    qkv: torch.Tensor  # [tokens, heads + 2 * kv_heads, head_dim]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    query_lens: np.ndarray
    context_lens: torch.Tensor
    heads: int
    page_size: int

    def inputs(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        kv_heads = self.k_cache.shape[1]
        starts = torch.tensor(np.concatenate(([0], np.cumsum(self.query_lens))), dtype=torch.int32)
        q, k, v = self.qkv.to(dtype).split((self.heads, kv_heads, kv_heads), dim=1)
        device = self.qkv.device
        caches = (self.k_cache.to(dtype), self.v_cache.to(dtype))
        return q, k, v, *caches, self.page_table, self.rows, starts.to(device), self.context_lens

    def expected(self, **options: object) -> torch.Tensor:
        options.setdefault("scale", 0.125)
        inputs = self.inputs(torch.float64)
        return reference.prefill_attention(*inputs, None, page_size=self.page_size, **options)  # type: ignore[arg-type]

    def computed(self, config: fast.PrefillConfig | None = SMALL, **options: object) -> torch.Tensor:
        options.setdefault("scale", 0.125)
        inputs = self.inputs(self.qkv.dtype)
        chosen = config or fast.config_for(self.heads, self.k_cache.shape[1], self.qkv.shape[2], self.qkv.dtype)
        blocks = torch.from_numpy(query_blocks(self.query_lens, chosen.block_queries)).to(self.qkv.device)
        return fast.prefill_attention(*inputs, blocks, page_size=self.page_size, config=config, **options)  # type: ignore[arg-type]


def make(
    query_lens: list[int], context_lens: list[int], device: torch.device, heads: int = 4, kv_heads: int = 2,
    head_dim: int = 32, page_size: int = 1, dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(sum(query_lens) + head_dim)
    max_rows = len(query_lens) + 3
    counts = [-(-n // page_size) for n in context_lens]
    order = (torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32)
    rows = torch.randperm(max_rows, generator=generator)[: len(query_lens)].to(torch.int32)
    page_table = torch.zeros((max_rows, max(1, *counts)), dtype=torch.int32)
    caches = [torch.full(((sum(counts) + 1) * page_size, kv_heads, head_dim), float("nan")) for _ in range(2)]
    taken = 0
    for row, length, count in zip(rows.tolist(), context_lens, counts, strict=True):
        page_table[row, :count] = order[taken : taken + count]
        taken += count
        for i in range(length):
            slot = int(page_table[row, i // page_size]) * page_size + i % page_size
            for cache in caches:
                cache[slot] = torch.randn((kv_heads, head_dim), generator=generator)
    qkv = torch.randn((sum(query_lens), heads + 2 * kv_heads, head_dim), generator=generator)
    qkv, k, v = (t.to(dtype).to(device) for t in (qkv, *caches))
    context = torch.tensor(context_lens, dtype=torch.int32)
    page_table, rows, context = page_table.to(device), rows.to(device), context.to(device)
    return Case(qkv, k, v, page_table, rows, np.array(query_lens, np.int32), context, heads, page_size)


def test_reference_equals_paged_attention() -> None:
    case = make([4, 1, 9], [5, 8, 0], torch.device("cpu"), page_size=1)
    q, k, v, *_ = case.inputs(torch.float64)
    starts = [0, 4, 5, 14]
    expected = []
    for i, context in enumerate([5, 8, 0]):
        part = slice(starts[i], starts[i + 1])
        slots = case.page_table[int(case.rows[i]), :context].long()
        keys = torch.cat((case.k_cache[slots].double(), k[part]))
        values = torch.cat((case.v_cache[slots].double(), v[part]))
        table = torch.arange(len(keys))[None]
        ends = [0, len(q[part])]
        row = paged_attention(q[part], keys, values, table, ends, [context], 1, 0.125, 6, 2.0, torch.arange(4))
        expected.append(row)
    torch.testing.assert_close(case.expected(window=6, softcap=2.0, sinks=torch.arange(4)), torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_ragged_rows_with_and_without_prefix(device: torch.device, dtype: torch.dtype, page_size: int) -> None:
    case = make([1, 16, 37, 1, 64], [33, 0, 16, 0, 5], device, dtype=dtype, page_size=page_size)
    got = case.computed()
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert_near(got, case.expected())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "pack"),
    [(1, 1, 64, 1), (6, 2, 32, 1), (12, 2, 16, 2), (8, 2, 80, 4), (4, 1, 96, 2), (16, 1, 16, 16)],
)
def test_head_shapes(device: torch.device, heads: int, kv_heads: int, head_dim: int, pack: int) -> None:
    case = make([20, 3], [18, 0], device, heads, kv_heads, head_dim)
    config = fast.PrefillConfig(block_m=32, block_n=16, pack=pack, num_warps=4, num_stages=2)
    assert_near(case.computed(config), case.expected())


@pytest.mark.parametrize("window", [1, 5, 16, 40, 1000])
def test_window(device: torch.device, window: int) -> None:
    case = make([50, 1, 7], [70, 45, 0], device)
    assert_near(case.computed(window=window), case.expected(window=window))


def test_softcap_and_stored_scales(device: torch.device) -> None:
    case = make([30, 2], [21, 40], device)
    options = {"softcap": 1.5, "k_scale": 2.0, "v_scale": 0.5, "scale": 0.5}
    assert_near(case.computed(**options), case.expected(**options))


@pytest.mark.parametrize("window", [None, 16])
def test_sinks(device: torch.device, window: int | None) -> None:
    case = make([30, 2, 1], [21, 0, 40], device)
    options = {"sinks": torch.tensor([-3.0, 0.5, 2.0, 5.0], device=device), "window": window, "v_scale": 0.5}
    assert_near(case.computed(**options), case.expected(**options))


def test_descriptors_give_the_same(device: torch.device) -> None:
    case = make([100, 37], [5, 20], device, dtype=torch.float16)
    by_engine = fast.PrefillConfig(block_m=32, block_n=16, pack=2, num_warps=4, num_stages=2, descriptors=True)
    assert_near(case.computed(by_engine), case.expected())
    padded = make([40], [5], device, head_dim=24, dtype=torch.float16)
    assert_near(padded.computed(by_engine), padded.expected())


def test_a_row_with_nan_spoils_no_other(device: torch.device) -> None:
    """A request whose numbers overflowed fails alone."""
    case = make([20, 20, 20], [0, 7, 0], device)
    expected = case.expected()
    case.qkv[20:40] = float("nan")
    got = case.computed()
    assert_near(got[:20], expected[:20])
    assert_near(got[40:], expected[40:])


def test_default_config_and_given_output(device: torch.device) -> None:
    case = make([70], [40], device)
    out = torch.empty((70, 4, 32), device=device)
    assert case.computed(None, out=out) is out
    assert_near(out, case.expected())


@settings(max_examples=50)
@given(
    lens=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    block_m=st.sampled_from([16, 64]),
    contexts=st.none() | st.integers(0, 500),
)
def test_blocks_cover_each_query_once_longest_first(lens: list[int], block_m: int, contexts: int | None) -> None:
    query_lens = np.array(lens, np.int32)
    context_lens = None if contexts is None else (np.arange(len(lens)) * contexts).astype(np.int32)
    blocks = query_blocks(query_lens, block_m, context_lens)
    assert blocks.dtype == np.int32
    expected = {(i, first) for i, n in enumerate(lens) for first in range(0, n, block_m)}
    assert len(blocks) == len(expected)
    assert {(i, first) for i, first in blocks.tolist()} == expected
    ahead = np.zeros_like(query_lens) if context_lens is None else context_lens
    keys = np.minimum(blocks[:, 1] + block_m, query_lens[blocks[:, 0]]) + ahead[blocks[:, 0]]
    assert (np.diff(keys) <= 0).all()


QUERY_LENS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
LEVELS = st.lists(st.sampled_from([0, 5, 16, 40, 64, 200, 1000]), min_size=12, max_size=12)


@given(QUERY_LENS, LEVELS, LEVELS)
def test_blocks_of_several_rows_cover_each_query_once(lens: list[int], levels: list[int], own: list[int]) -> None:
    common = np.array([0, *levels[1 : len(lens)]], np.int32)
    contexts = np.maximum(common, np.append(common[1:], 0)) + np.array(own[: len(lens)], np.int32)
    blocks = blocks_together(np.array(lens, np.int32), contexts, common, SMALL)
    if blocks is None:
        return
    starts, seen = np.cumsum([0, *lens]), list[int]()
    for place, first, members, shared in blocks.tolist():
        assert shared % SMALL.block_n == 0 and shared <= contexts[place : place + members].min()
        assert (common[place + 1 : place + members] >= shared).all(), "they do not share so much"
        end = min(int(starts[place]) + first + SMALL.block_queries, int(starts[place + members]))
        assert first < lens[place] and (end > starts[place + members - 1])
        seen += range(int(starts[place]) + first, end)
    assert sorted(seen) == list(range(int(starts[-1])))


def test_short_chunks_over_a_long_prefix_are_read_together() -> None:
    lens, contexts, common = (np.array(values, np.int32) for values in ([4] * 8, [1000] * 8, [0] + [1000] * 7))
    blocks = blocks_together(lens, contexts, common, SMALL)
    assert blocks is not None and sorted(blocks.tolist()) == [[0, 0, 4, 992], [4, 0, 4, 992]]
    assert blocks_together(lens, contexts, np.zeros(8, np.int32), SMALL) is None, "nothing is shared"
    assert blocks_together(lens * 4, contexts, common, SMALL) is None, "each fills a block by itself"
    assert blocks_together(lens, contexts + 3000, common, SMALL) is None, "each reads more by itself"


@pytest.mark.parametrize(
    ("dtype", "cache", "options"),
    [
        (torch.float32, None, {}),
        (torch.float16, None, {"softcap": 2.0}),
        (torch.float32, None, {"sinks": True}),
        (torch.float16, torch.float8_e4m3fn, {"k_scale": 0.5, "v_scale": 2.0}),
    ],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"), [(4, 2, 32, 1), (4, 1, 80, 4), (12, 2, 16, 16)]
)
def test_chunks_of_one_prefix_read_it_once(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    cache: torch.dtype | None,
    options: dict[str, object],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
) -> None:
    """Chunks of any size, some over two levels of a tree, and one row that shares nothing. Only the first row's pages
    of a block are right: every other row's lead, where it shares, to numbers that would be seen in any result."""
    monkeypatch.setattr(fast, "WORTH", 1.0)
    lens, common = [3, 5, 1, 9, 2, 40, 4, 7, 3], [0, 64, 64, 128, 128, 48, 0, 48, 48]
    case = make(lens, [90, 70, 140, 131, 128, 64, 50, 48, 61], device, heads, kv_heads, head_dim, page_size, dtype)
    rows = case.rows.tolist()
    for place in range(1, len(rows)):
        pages = common[place] // page_size
        case.page_table[rows[place], :pages] = case.page_table[rows[place - 1], :pages]
    options = {"sinks": torch.arange(heads, device=device)} if options.get("sinks") else options
    if cache is not None:
        case.k_cache, case.v_cache = (stored.to(cache) for stored in (case.k_cache, case.v_cache))
    expected = case.expected(**options)
    blocks = blocks_together(case.query_lens, case.context_lens.cpu().numpy(), np.array(common, np.int32), SMALL)
    assert blocks is not None
    joined = [block for block in blocks.tolist() if block[2] > 1]
    assert len(joined) > 1
    q, k, v, k_cache, v_cache, table, *others = case.inputs(dtype)
    if cache is not None:
        k_cache, v_cache = case.k_cache, case.v_cache
    table, firsts = table.clone(), {place for place, *_ in blocks.tolist()}
    for place, _, members, shared in joined:
        for other in set(range(place + 1, place + members)) - firsts:
            table[rows[other], : shared // page_size] = 0  # a page of NaN
    given = (q, k, v, k_cache, v_cache, table, *others, torch.from_numpy(blocks).to(device))
    got = fast.prefill_attention(*given, page_size=page_size, scale=0.125, config=SMALL, **options)  # type: ignore[arg-type]
    assert_near(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 8), (32, 8), (12, 2)])
def test_on_the_gpu(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int
) -> None:
    case = make([1, 300, 64, 129], [700, 0, 64, 37], device, heads, kv_heads, head_dim, page_size, dtype)
    for window in (None, 100):
        assert_near(case.computed(None, window=window), case.expected(window=window))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("queries", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_8_bit_caches(device: torch.device, dtype: torch.dtype, queries: torch.dtype) -> None:
    """The prefix as the caches hold it, times its scale; the fresh tokens as they are."""
    case = make([1, 37], [33, 16], device, dtype=queries)
    case.k_cache, case.v_cache = case.k_cache.to(dtype), case.v_cache.to(dtype)
    q, k, v, _, _, *others = case.inputs(queries)
    blocks = torch.from_numpy(query_blocks(case.query_lens, SMALL.block_queries)).to(device)
    options = {"page_size": 1, "scale": 0.125, "k_scale": 0.5, "v_scale": 2.0, "config": SMALL}
    got = fast.prefill_attention(q, k, v, case.k_cache, case.v_cache, *others, blocks, **options)  # type: ignore[arg-type]
    assert_near(got, case.expected(k_scale=0.5, v_scale=2.0))
