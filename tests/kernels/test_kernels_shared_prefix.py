"""Tree attention: every key of every row is read exactly once, and the result is that of reading row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.kernels.decode_attention import shared
from bough.kernels.decode_attention.shared import SharedWork, plan_shared, shared_runs
from bough.kernels.decode_attention.triton import decode_attention
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from tests.kernels.closeness import assert_near
from tests.kernels.test_kernels_decode_attention import SINKS, Case, make

COMMON = st.lists(st.sampled_from([0, 1, 70, 128, 300, 300, 1000, 4000]), min_size=1, max_size=40).map(
    lambda common: np.array([0, *common[1:]], dtype=np.int32)
)


@given(COMMON, st.sampled_from([1, 3, 8, 32]), st.sampled_from([1, 8]), st.integers(1, 400))
def test_all_that_is_read_together_is_read_once(common: np.ndarray, at_once: int, kv_heads: int, most: int) -> None:
    planned = plan_shared(common, at_once, kv_heads, most)
    if planned is None:
        return
    read = [list[tuple[int, int]]() for _ in common]
    parts: list[list[int]] = [[] for _ in common]
    for place, rows, first, end, part in planned.items.tolist():
        assert 1 <= rows <= at_once and first < end
        # What a program reads from its first row's pages stands on those of its others too.
        assert (common[place + 1 : place + rows] >= end).all()
        for row in range(place, place + rows):
            read[row].append((first, end))
            parts[row].append(part)
    for row, own in enumerate(planned.own_first.tolist()):
        ends = [0, *(end for _, end in sorted(read[row]))]
        assert [first for first, _ in sorted(read[row])] == ends[:-1] and ends[-1] == own
        assert sorted(parts[row]) == list(range(int(planned.part_starts[row + 1] - planned.part_starts[row])))
    assert planned.part_starts[-1] <= most and len(planned.items) <= shared.MAX_ITEMS


def test_runs_are_cut_where_sharing_pays() -> None:
    system, chats = 1000, [0, 1000, 2500, 1000, 1003, 0, 40]
    assert list(shared_runs(np.array(chats, dtype=np.int32), 32)) == [(0, 5, 0, system), (1, 2, 1000, 2500)]


def share(case: Case, common: list[int]) -> Case:
    """The same step, with each row's first keys on the pages of the row before."""
    rows, table = case.rows.tolist(), case.page_table.clone()
    for place in range(1, len(rows)):
        pages = common[place] // case.page_size
        table[rows[place], :pages] = table[rows[place - 1], :pages]
    return Case(case.q, case.k_cache, case.v_cache, table, case.rows, case.lengths, case.page_size)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "page_size", "options"),
    [
        (torch.float16, 4, 2, 64, 1, {}),
        (torch.float32, 4, 2, 32, 4, {"softcap": 2.0}),
        (torch.float32, 4, 2, 32, 1, {"sinks": True}),
        (torch.float16, 6, 2, 80, 4, {}),
        (torch.float16, 20, 1, 16, 1, {"k_scale": 0.5, "v_scale": 3.0}),
        (torch.float16, 4, 2, 64, 1, {"cache": torch.float8_e4m3fn, "k_scale": 0.5, "v_scale": 2.0}),
        (torch.float32, 6, 2, 80, 4, {"cache": torch.float8_e5m2}),
    ],
)
def test_results_are_those_of_reading_row_by_row(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    options: dict[str, object],
) -> None:
    for name, value in {"MIN_SAVED": 1, "PART_KEYS": 1, "KEY_STEP": 32, "PROGRAMS": 8, "MAX_ITEMS": 40}.items():
        monkeypatch.setattr(shared, name, value)
    if options.get("sinks"):
        options = {"sinks": SINKS.to(device)}
    options, cache = dict(options), options.get("cache", dtype)
    options.pop("cache", None)
    common = [0, 40, 40, 120, 120, 0, 64, 64]
    case = share(
        make([130, 60, 150, 121, 125, 65, 70, 80], device, heads, kv_heads, head_dim, page_size, dtype), common
    )
    case.k_cache, case.v_cache = case.k_cache.to(cache), case.v_cache.to(cache)
    work = DecodeWork(8, heads, kv_heads, head_dim, device, programs=kv_heads * 4)
    together = SharedWork(10, heads, kv_heads, head_dim, device)
    packed, changed = together.plan(np.array(common, dtype=np.int32))
    assert changed and packed is not None and packed[0] > 3
    together.buffer.copy_(torch.from_numpy(packed))
    plan_decode(case.lengths, work, together.own_first)
    q, _, _, *rest = case.cast(dtype)
    scores = {"page_size": page_size, "scale": 0.125, **options}
    got = decode_attention(q, case.k_cache, case.v_cache, *rest, work, shared=together, **scores)  # type: ignore[arg-type]
    assert_near(got, case.expected(**options))
    assert together.plan(np.array(common, dtype=np.int32))[1] is False
    assert together.plan(np.zeros(8, dtype=np.int32)) == (None, False)


def test_latents_are_read_together(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MIN_SAVED": 1, "PART_KEYS": 1, "KEY_STEP": 32, "PROGRAMS": 2, "MAX_ITEMS": 20}.items():
        monkeypatch.setattr(shared, name, value)
    heads, rank, width, common = 8, 32, 48, [0, 40, 40, 0, 64, 64]
    case = share(make([130, 60, 50, 65, 70, 100], device, heads, 1, width, 1, torch.float32), common)
    case = Case(case.q, case.k_cache, case.k_cache[..., :rank], *case.cast(torch.float32)[3:], 1)
    work = DecodeWork(6, heads, 1, rank, device, programs=4, key_step=32)
    together = SharedWork(6, heads, 1, rank, device)
    packed, _ = together.plan(np.array(common, dtype=np.int32))
    assert packed is not None and packed[0] > 1
    together.buffer.copy_(torch.from_numpy(packed))
    plan_decode(case.lengths, work, together.own_first)
    options = {"page_size": 1, "scale": 0.125, "v_scale": 2.0}
    q, latents, _, *rest = case.cast(torch.float32)
    got = decode_attention(q, latents, latents[..., :rank], *rest, work, shared=together, **options)  # type: ignore[arg-type]
    assert_near(got, case.expected(v_scale=2.0))
