"""Decode attention against the reference in float64, and what the plan of its work promises.

Triton's interpreter multiplies bfloat16 matrices as if they were integers: that type is tested on a GPU only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.kernels.decode_attention import triton as fast
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from tests.fakes.triton_interpreter import INTERPRETED_PROGRAMS
from tests.kernels.closeness import assert_near
from tests.kernels.references import paged_attention as reference
from tests.kernels.references.paged_attention import paged_attention

SINKS = torch.tensor([-3.0, 0.5, 2.0, 5.0])  # of four heads


@dataclass
class Case:
    """A step's inputs; the queries are a strided part of a larger tensor, and unused slots hold NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    page_size: int

    def cast(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return (
            self.q.to(dtype), self.k_cache.to(dtype), self.v_cache.to(dtype), self.page_table, self.rows, self.lengths
        )  # fmt: skip

    def expected(self, **options: object) -> torch.Tensor:
        options.setdefault("scale", 0.125)
        return reference.decode_attention(*self.cast(torch.float64), None, page_size=self.page_size, **options)  # type: ignore[arg-type]

    def computed(self, work: DecodeWork | None = None, **options: object) -> torch.Tensor:
        options.setdefault("scale", 0.125)
        if work is None and self.q.device.type == "cpu":
            shape = (*self.q.shape[:2], self.k_cache.shape[1], self.q.shape[2])
            work = few_programs(*shape, self.lengths, options.get("window"))  # type: ignore[arg-type]
        return fast.decode_attention(*self.cast(self.q.dtype), work, page_size=self.page_size, **options)  # type: ignore[arg-type]


def few_programs(
    batch: int, heads: int, kv_heads: int, head_dim: int, lengths: torch.Tensor, window: int | None
) -> DecodeWork:
    """A plan for the interpreter."""
    programs = kv_heads * INTERPRETED_PROGRAMS
    work = DecodeWork(batch, heads, kv_heads, head_dim, lengths.device, window=window, programs=programs)
    plan_decode(lengths, work)
    return work


def make(
    lengths: list[int], device: torch.device, heads: int = 4, kv_heads: int = 2, head_dim: int = 64,
    page_size: int = 1, dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(len(lengths) + head_dim)
    batch, max_rows = len(lengths), len(lengths) + 3
    widest = max(-(-n // page_size) for n in lengths)
    pages = sum(-(-n // page_size) for n in lengths)
    order = (torch.randperm(pages, generator=generator) + 1).to(torch.int32)
    rows = torch.randperm(max_rows, generator=generator)[:batch].to(torch.int32)
    page_table = torch.zeros((max_rows, widest), dtype=torch.int32)
    caches = [torch.full(((pages + 1) * page_size, kv_heads, head_dim), float("nan")) for _ in range(2)]
    taken = 0
    for row, length in zip(rows.tolist(), lengths, strict=True):
        count = -(-length // page_size)
        page_table[row, :count] = order[taken : taken + count]
        taken += count
        for i in range(length):
            slot = int(page_table[row, i // page_size]) * page_size + i % page_size
            for cache in caches:
                cache[slot] = torch.randn((kv_heads, head_dim), generator=generator)
    qkv = torch.randn((batch, heads + 2 * kv_heads, head_dim), generator=generator)
    q, k, v = (t.to(dtype).to(device) for t in (qkv, *caches))
    moved = (t.to(device) for t in (page_table, rows, torch.tensor(lengths, dtype=torch.int32)))
    return Case(q[:, :heads], k, v, *moved, page_size)


def test_reference_equals_paged_attention() -> None:
    case = make([5, 1, 17], torch.device("cpu"), page_size=4)
    q, k, v, table, rows, lengths = case.cast(torch.float64)
    expected = paged_attention(
        q, k, v, table[rows.long()], range(4), [n - 1 for n in lengths.tolist()], 4, 0.125, 6, 2.0, SINKS
    )
    torch.testing.assert_close(case.expected(window=6, softcap=2.0, sinks=SINKS), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_of_many_lengths(device: torch.device, dtype: torch.dtype, page_size: int) -> None:
    case = make([1, 127, 128, 300, 7], device, dtype=dtype, page_size=page_size)
    got = case.computed()
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert_near(got, case.expected())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 64), (9, 3, 64), (4, 4, 80), (6, 2, 96), (16, 1, 128), (20, 1, 16), (2, 1, 256)],
)
def test_head_shapes(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> None:
    case = make([3, 200], device, heads, kv_heads, head_dim, dtype=torch.float16)
    assert_near(case.computed(), case.expected())


@pytest.mark.parametrize("window", [1, 40, 130, 1000])
def test_window(device: torch.device, window: int) -> None:
    case = make([1, 39, 41, 290], device)
    assert_near(case.computed(window=window), case.expected(window=window))


def test_softcap_and_stored_scales(device: torch.device) -> None:
    case = make([20, 150], device)
    got = case.computed(softcap=1.5, k_scale=2.0, v_scale=0.5, scale=0.5)
    assert_near(got, case.expected(softcap=1.5, k_scale=2.0, v_scale=0.5, scale=0.5))


@pytest.mark.parametrize("window", [None, 200])
def test_sinks_count_once_however_many_parts_a_row_has(device: torch.device, window: int | None) -> None:
    case, sinks = make([1, 20, 700], device), SINKS.to(device)
    work = DecodeWork(3, 4, 2, 64, device, window=window, programs=16)
    plan_decode(case.lengths, work)
    assert [int(work.items[i, 3]) > 1 for i in (0, 1, 2)] == [False, False, True]
    options = {"window": window, "sinks": sinks, "v_scale": 0.5}
    assert_near(case.computed(work, **options), case.expected(**options))


def test_a_given_output_and_config_are_used(device: torch.device) -> None:
    case = make([20, 150], device)
    out = torch.empty_like(case.q, memory_format=torch.contiguous_format)
    assert case.computed(out=out, config=fast.DecodeConfig(block_n=16, num_warps=2, num_stages=2)) is out
    assert_near(out, case.expected())


@pytest.mark.slow
def test_work_made_for_more_rows_serves_fewer_again_and_again(device: torch.device) -> None:
    work = DecodeWork(8, 4, 2, 64, device)
    for lengths in ([700, 2], [5, 5, 300]):
        case = make(lengths, device)
        plan_decode(case.lengths, work)
        assert_near(case.computed(work), case.expected())
    with pytest.raises(ValueError, match="does not fit"):
        plan_decode(torch.ones(9, dtype=torch.int32, device=device), work)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [300, 1200])
def test_few_and_many_parts_of_a_row(device: torch.device, keys: int) -> None:
    case = make([keys, 5, 130], device)
    work = DecodeWork(3, 4, 2, 64, device)
    plan_decode(case.lengths, work)
    parts = int(work.items[0, 3])
    at_once = fast.parts_at_once(2, 64)
    assert parts > at_once if keys > 1000 else 1 < parts < at_once
    for store in (work.partial, work.log_sums):
        store.fill_(torch.nan)  # what no program wrote must not be read
    for _ in range(2):
        assert_near(case.computed(work), case.expected())
        case.q.neg_()  # parts of the first launch are wrong in the second: who is last is counted from zero again


def items_of(lengths: list[int], work: DecodeWork, device: torch.device) -> list[list[int]]:
    plan_decode(torch.tensor(lengths, dtype=torch.int32, device=device), work)
    return work.items[: int(work.first_item[len(lengths)])].tolist()


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    window=st.none() | st.integers(1, 3000),
    kv_heads=st.sampled_from([1, 8, 64]),
)
def test_items_cover_each_key_once(lengths: list[int], window: int | None, kv_heads: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = DecodeWork(20, kv_heads, kv_heads, 16, device, window=window)
    items = items_of(lengths, work, device)
    assert len(items) <= work.max_items(len(lengths))
    by_row = {place: list(group) for place, group in itertools.groupby(items, key=lambda item: item[0])}
    assert list(by_row) == list(range(len(lengths)))
    for place, length in enumerate(lengths):
        parts = by_row[place]
        assert parts[0][1] == (0 if window is None else max(0, length - window))
        assert parts[-1][2] == length
        assert all(left[2] == right[1] for left, right in itertools.pairwise(parts))
        assert all(first < last for _, first, last, _ in parts)
        assert {count for *_, count in parts} == {len(parts)}
        assert int(work.first_item[place]) == items.index(parts[0])


def test_long_rows_are_cut_and_short_ones_are_not(device: torch.device) -> None:
    work = DecodeWork(64, 8, 8, 16, device)
    assert len(items_of([600], work, device)) == 5
    assert len(items_of([100_000], work, device)) > 40
    assert len(items_of([100] * 64, work, device)) == 64


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 8), (32, 8), (12, 2)])
def test_on_the_gpu(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int
) -> None:
    case = make([1, 900, 64, 333], device, heads, kv_heads, head_dim, page_size, dtype)
    for window in (None, 100):
        assert_near(case.computed(window=window), case.expected(window=window))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("queries", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_8_bit_caches(device: torch.device, dtype: torch.dtype, queries: torch.dtype) -> None:
    """Compared with exact attention over what the caches hold."""
    case = make([5, 130], device, page_size=4, dtype=queries)
    case.k_cache, case.v_cache = case.k_cache.to(dtype), case.v_cache.to(dtype)
    inputs = (case.page_table, case.rows, case.lengths, None)
    options = {"page_size": 4, "scale": 0.125, "k_scale": 0.5, "v_scale": 2.0}
    got = fast.decode_attention(case.q, case.k_cache, case.v_cache, *inputs, **options)  # type: ignore[arg-type]
    assert_near(got, case.expected(k_scale=0.5, v_scale=2.0))
