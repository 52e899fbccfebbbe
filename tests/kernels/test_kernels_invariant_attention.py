"""Invariant attention: near the reference in float64, and the same bits however a token comes to be computed.

Triton's interpreter computes with numpy: equal bits there show that the order of sums is the same, and a GPU's own
arithmetic is checked by `gpu_check_deterministic.py`. It multiplies bfloat16 matrices as if they were integers: that
type is tested on a GPU only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from bough.kernels.invariant_attention import triton as fast
from bough.kernels.invariant_attention.triton import DecodeItems, prefill_items
from tests.kernels.closeness import assert_near
from tests.kernels.references import paged_attention as reference

SMALL = fast.InvariantConfig(chunk=32, block_m=32, block_n=16, pack=2, num_warps=4, num_stages=2)
SCALE = 0.25


@dataclass
class Sequences:
    """Whole sequences, their keys and values in scattered pages; slots that nobody wrote hold NaN."""

    q: list[torch.Tensor]  # for each sequence [length, heads, head_dim]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    page_size: int

    def batch(self, parts: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
        """The step that computes positions first..last of the sequences: (sequence, first, last) each."""
        device = self.k_cache.device
        q = torch.cat([self.q[row][first:last] for row, first, last in parts])
        rows = torch.tensor([row for row, _, _ in parts], dtype=torch.int32)
        starts = torch.tensor(np.cumsum([0, *(last - first for _, first, last in parts)]), dtype=torch.int32)
        lengths = torch.tensor([last for _, _, last in parts], dtype=torch.int32)
        return q, self.k_cache, self.v_cache, self.page_table, *(t.to(device) for t in (rows, starts, lengths))

    def expected(self, row: int, **options: object) -> torch.Tensor:
        """The whole sequence in float64."""
        inputs = [t.double() if t.is_floating_point() else t for t in self.batch([(row, 0, len(self.q[row]))])]
        return reference.invariant_attention(  # type: ignore[arg-type]
            *inputs, None, page_size=self.page_size, scale=SCALE, **options
        )

    def step(
        self,
        parts: list[tuple[int, int, int]],
        config: fast.InvariantConfig = SMALL,
        *,
        split_items: int = 64,
        programs: int | None = None,
        **options: object,
    ) -> dict[int, torch.Tensor]:
        """As a back end does: leading parts of one token are decodes, the others prompts. Results by sequence."""
        several = [i for i, (_, first, last) in enumerate(parts) if last - first > 1]
        decodes = several[0] if several else len(parts)
        inputs = self.batch(parts)
        heads, head_dim = inputs[0].shape[1:]
        window = options.get("window")
        assert window is None or isinstance(window, int)
        work = DecodeItems(
            len(parts), heads, head_dim, inputs[0].device, chunk=config.chunk, window=window, split_items=split_items
        )
        out = torch.full_like(inputs[0], float("nan"))
        common = {"partials": work.partials, "page_size": self.page_size, "scale": SCALE, "out": out, "config": config}
        if decodes:
            work.plan(inputs[6][:decodes])
            grid = programs or work.programs(decodes, heads // config.pack)
            fast.invariant_attention(*inputs, work.items, programs=grid, split_rows=decodes, **common, **options)  # type: ignore[arg-type]
        if several:
            lens = np.array([last - first for _, first, last in parts[decodes:]], dtype=np.int32)
            contexts = np.array([first for _, first, _ in parts[decodes:]], dtype=np.int32)
            items = prefill_items(lens, contexts, config.block_queries, decodes)
            on_device = torch.from_numpy(items).to(out.device)
            fast.invariant_attention(
                *inputs,
                on_device,
                programs=len(items) - 1,
                split_rows=0,
                **common,
                **options,  # type: ignore[arg-type]
            )
        starts = inputs[5].tolist()
        return {row: out[starts[i] : starts[i + 1]] for i, (row, _, _) in enumerate(parts)}


def make(
    lengths: list[int], device: torch.device, heads: int = 4, kv_heads: int = 2, head_dim: int = 16,
    page_size: int = 1, dtype: torch.dtype = torch.float32,
) -> Sequences:  # fmt: skip
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    counts = [-(-n // page_size) for n in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32)
    page_table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    caches = [torch.full(((sum(counts) + 1) * page_size, kv_heads, head_dim), float("nan")) for _ in range(2)]
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        page_table[row, :count] = order[taken : taken + count]
        taken += count
        key = torch.arange(length)
        slots = page_table[row].long()[key // page_size] * page_size + key % page_size
        for cache in caches:
            cache[slots] = torch.randn((length, kv_heads, head_dim), generator=generator)
    q = [torch.randn((n, heads, head_dim), generator=generator).to(dtype).to(device) for n in lengths]
    k, v = (cache.to(dtype).to(device) for cache in caches)
    return Sequences(q, k, v, page_table.to(device), page_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "pack"), [(4, 2, 16, 2), (3, 1, 24, 1), (4, 1, 32, 4), (2, 1, 96, 2)]
)
def test_it_is_near_the_reference(
    device: torch.device, dtype: torch.dtype, page_size: int, heads: int, kv_heads: int, head_dim: int, pack: int
) -> None:
    sequences = make([77, 40], device, heads, kv_heads, head_dim, page_size, dtype)
    config = replace(SMALL, pack=pack)
    got = sequences.step([(1, 39, 40), (0, 30, 77)], config)
    assert_near(got[0], sequences.expected(0)[30:])
    assert_near(got[1], sequences.expected(1)[39:])


@pytest.mark.parametrize(
    "options",
    [
        {"window": 21},
        {"sinks": torch.tensor([-3.0, 0.5, 2.0, 5.0])},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"softcap": 1.5, "v_scale": 0.5})),
        pytest.param({"window": 70}, marks=pytest.mark.long),
    ],
)
def test_the_bits_of_a_token_are_always_the_same(device: torch.device, options: dict[str, object]) -> None:
    """In one go, in chunks of every kind, as decodes that are split or not, alone and in company."""
    length = 75
    options = {name: value.to(device) if torch.is_tensor(value) else value for name, value in options.items()}
    sequences = make([length, 66, 35], device)
    whole = sequences.step([(0, 0, length)], **options)[0]
    assert_near(whole, sequences.expected(0, **options))
    for chunk in (19, 48):
        for first in range(0, length, chunk):
            last = min(first + chunk, length)
            assert torch.equal(sequences.step([(0, first, last)], **options)[0], whole[first:last])
    for at in (0, 31, 32, 74):
        for split_items in (64, 0):
            alone = sequences.step([(0, at, at + 1)], split_items=split_items, programs=2, **options)[0]
            assert torch.equal(alone, whole[at : at + 1]), (at, split_items)
    company = [(1, 65, 66), (0, 74, 75), (2, 10, 35)]
    assert torch.equal(sequences.step(company, **options)[0], whole[74:])
    assert torch.equal(sequences.step([(1, 65, 66), (2, 0, 9), (0, 64, 75)], **options)[0], whole[64:])


def test_decodes_are_split_into_chunks_only_as_far_as_there_is_room(device: torch.device) -> None:
    def items(lengths: list[int], split_items: int, window: int | None = None) -> list[list[int]]:
        work = DecodeItems(8, 2, 16, device, chunk=10, window=window, split_items=split_items)
        work.plan(torch.tensor(lengths, dtype=torch.int32, device=device))
        listed = work.items.tolist()
        firsts = work.partials.first_item[: len(lengths) + 1].tolist()
        assert firsts[-1] == listed[0][0]
        assert [listed[1 + i][0] for i in firsts[:-1]] == list(range(len(lengths)))
        return listed[1 : 1 + listed[0][0]]

    assert items([10, 11], 8) == [[0, 0, -1], [1, 0, 0], [1, 0, 1]]
    # Eight rows and four more: the row of five chunks is split, those of two are not.
    assert items([20] * 7 + [41], 4) == [[row, 0, -1] for row in range(7)] + [[7, 0, chunk] for chunk in range(5)]
    assert items([20, 41], 0) == [[0, 0, -1], [1, 0, -1]]
    assert items([45], 8, window=20) == [[0, 0, 2], [0, 0, 3], [0, 0, 4]]
    with pytest.raises(ValueError, match="9 rows"):
        items([1] * 9, 4)


def test_prompts_become_blocks_behind_their_number() -> None:
    items = prefill_items(np.array([5, 2], np.int32), np.array([0, 100], np.int32), 4, first_place=3)
    assert items.tolist() == [[3, -1, -1], [4, 0, -1], [3, 4, -1], [3, 0, -1]]


def test_a_row_with_nan_spoils_no_other(device: torch.device) -> None:
    sequences = make([40, 40], device)
    expected = sequences.expected(1)
    sequences.q[0][:] = float("nan")
    got = sequences.step([(0, 0, 40), (1, 0, 40)])
    assert got[0].isnan().all()
    assert_near(got[1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (16, 8), (32, 8)])
@pytest.mark.parametrize("window", [None, 300])
def test_on_the_gpu(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    sequences = make([1300, 700], device, heads, kv_heads, head_dim, 1, dtype)
    config = fast.config_for(heads, kv_heads, head_dim, dtype)
    whole = sequences.step([(0, 0, 1300)], config, window=window)[0]
    assert_near(whole, sequences.expected(0, window=window))
    for first, last in ((0, 511), (511, 777), (777, 1300)):
        assert torch.equal(
            sequences.step([(1, 699, 700), (0, first, last)], config, window=window)[0], whole[first:last]
        )
    for at in (0, 63, 511, 512, 1023, 1024, 1299):
        for split_items in (512, 0):
            alone = sequences.step([(0, at, at + 1)], config, split_items=split_items, window=window)[0]
            assert torch.equal(alone, whole[at : at + 1]), (at, split_items)
