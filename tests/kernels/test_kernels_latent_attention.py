"""What is particular to latent attention: every implementation against the formulas in float64, and both forms of the
attention against each other.

Triton's interpreter multiplies bfloat16 matrices as if they were integers: that type is tested on a GPU only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from bough.core.model_config import LatentConfig
from bough.kernels.decode_attention import triton as decode
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from bough.kernels.invariant_attention import triton as invariant
from bough.kernels.invariant_attention.triton import DecodeItems, Partials, prefill_items
from bough.kernels.latent_attention import reference
from bough.kernels.latent_attention import triton as fast
from bough.kernels.prefill_attention.triton import query_blocks
from tests.fakes.triton_interpreter import INTERPRETED_PROGRAMS
from tests.kernels.closeness import assert_near
from tests.kernels.references.paged_attention import paged_attention

SMALL = LatentConfig(rank=20, rope_dim=8, nope_dim=12, value_dim=10)  # nothing is a power of two
EVEN = LatentConfig(rank=32, rope_dim=16, nope_dim=16, value_dim=16)
LATENTS = [pytest.param(SMALL, id="small"), pytest.param(EVEN, id="even")]
IMPLEMENTATIONS = [pytest.param(reference, id="reference"), pytest.param(fast, id="triton")]
EPS = 1e-6


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def expand(latents: torch.Tensor, weight: torch.Tensor, latent: LatentConfig) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.einsum("tr,hor->tho", latents[:, : latent.rank], weight)
    return reference.expand(latents, made, latent)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [1, 11])
def test_store(module: object, latent: LatentConfig, dtype: torch.dtype, heads: int, device: torch.device) -> None:
    """Queries and latents are parts of one projection; slots that are not named keep what they hold."""
    tokens, head_dim = 5, latent.nope_dim + latent.rope_dim
    projected = draw(tokens, heads * head_dim + latent.width, device=device, dtype=dtype)
    weight = draw(latent.rank, device=device, dtype=dtype, seed=1)
    angle = draw(50, latent.rope_dim // 2, device=device, seed=2) * 3
    positions, slots = torch.tensor([3, 49, 0, 7, 7], device=device), torch.tensor([4, 0, 8, 2, 6], device=device)
    cache = torch.full((10, 1, latent.width), 7.0, dtype=dtype, device=device)
    wide = projected.double()
    q, latents = wide[:, : heads * head_dim].view(tokens, heads, head_dim), wide[:, heads * head_dim :]

    def turned(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (part.double()[positions, None] for part in (angle.cos(), angle.sin()))
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    expected_q = torch.cat((q[..., : latent.nope_dim], turned(q[..., latent.nope_dim :])), dim=-1)
    c = latents[:, : latent.rank]
    normed = c / torch.sqrt((c * c).mean(-1, keepdim=True) + EPS) * weight.double()
    expected = torch.cat((normed, turned(latents[:, None, latent.rank :])[:, 0]), dim=-1)

    own_q = projected[:, : heads * head_dim].view(tokens, heads, head_dim)
    own = projected[:, heads * head_dim :]
    store: Callable[..., None] = module.latent_store_  # type: ignore[attr-defined]
    store(own_q, own, weight, EPS, angle.cos(), angle.sin(), positions, slots, cache)
    assert_near(own_q, expected_q)
    assert_near(own, expected)
    assert torch.equal(cache[slots, 0], own)
    others = [slot for slot in range(10) if slot not in slots.tolist()]
    assert bool((cache[others] == 7.0).all())


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_store_of_8_bits_divides_by_the_scale_and_saturates(
    module: object, dtype: torch.dtype, device: torch.device
) -> None:
    latents, weight = draw(3, SMALL.width, device=device), torch.ones(SMALL.rank, device=device)
    latents[1, -1] = 1e6
    angle, slots = torch.zeros(4, SMALL.rope_dim // 2, device=device), torch.tensor([2, 0, 3], device=device)
    cache = torch.zeros(5, 1, SMALL.width, device=device).to(dtype)
    q = draw(3, 2, SMALL.nope_dim + SMALL.rope_dim, device=device)
    store: Callable[..., None] = module.latent_store_  # type: ignore[attr-defined]
    positions = torch.arange(3, device=device)
    store(q, latents, weight, EPS, angle.cos(), angle.sin(), positions, slots, cache, 0.25)
    largest = torch.finfo(dtype).max
    expected = (latents * 4.0).clamp(-largest, largest).to(dtype).float()
    assert torch.equal(cache.float()[slots, 0], expected)
    assert float(cache.float()[0, 0, -1]) == largest


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float32), (3, torch.float16), (70, torch.float32)])
def test_ways_to_latents_and_back(
    module: object, latent: LatentConfig, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    heads, head_dim = 3, latent.nope_dim + latent.rope_dim
    weight = draw(heads, latent.nope_dim + latent.value_dim, latent.rank, device=device, dtype=dtype)
    q = draw(tokens, heads * head_dim + 5, device=device, dtype=dtype, seed=1)[:, : heads * head_dim]
    q = q.view(tokens, heads, head_dim)
    found = module.absorb(q, weight, latent.nope_dim)  # type: ignore[attr-defined]
    keys, values = weight.double().split((latent.nope_dim, latent.value_dim), dim=1)
    mapped = torch.einsum("thn,hnr->thr", q[..., : latent.nope_dim].double(), keys)
    assert_near(found, torch.cat((mapped, q[..., latent.nope_dim :].double()), dim=-1))
    attended = draw(tokens, heads, latent.rank, device=device, dtype=dtype, seed=2)
    lifted = module.lift(attended, weight, latent.nope_dim)  # type: ignore[attr-defined]
    assert_near(lifted, torch.einsum("thr,hvr->thv", attended.double(), values))


def test_ways_have_the_same_bits_for_any_number_of_tokens(device: torch.device) -> None:
    weight = draw(3, EVEN.nope_dim + EVEN.value_dim, EVEN.rank, device=device)
    q = draw(40, 3, EVEN.nope_dim + EVEN.rope_dim, device=device, seed=1)
    whole = fast.absorb(q, weight, EVEN.nope_dim, block_t=16)
    for part in (slice(7, 8), slice(0, 20), slice(5, 38)):
        assert torch.equal(fast.absorb(q[part], weight, EVEN.nope_dim, block_t=16), whole[part])


class Paged:
    """Latents of rows on scattered pages; slots that no row has hold NaN."""

    def __init__(self, lengths: list[int], latent: LatentConfig, page_size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        counts = [-(-length // page_size) for length in lengths]
        order = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())
        self.table = torch.zeros((len(lengths) + 2, max(counts)), dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].to(torch.int32)
        self.latents = [torch.randn((length, latent.width), generator=generator).to(device) for length in lengths]
        self.cache = torch.full(((sum(counts) + 1) * page_size, 1, latent.width), float("nan"), device=device)
        for row, latents, count in zip(self.rows.tolist(), self.latents, counts, strict=True):
            self.table[row, :count] = torch.tensor([next(order) for _ in range(count)])
            for i, line in enumerate(latents):
                self.cache[int(self.table[row, i // page_size]) * page_size + i % page_size, 0] = line
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.table, self.rows = self.table.to(device), self.rows.to(device)
        self.page_size = page_size


def expected_decodes(q: torch.Tensor, paged: Paged, weight: torch.Tensor, latent: LatentConfig) -> torch.Tensor:
    """By the expanded form, in float64."""
    out = []
    for query, latents in zip(q.double(), paged.latents, strict=True):
        k, v = expand(latents.double(), weight.double(), latent)
        scores = torch.einsum("hd,nhd->hn", query, k) * 0.2
        out.append(torch.einsum("hn,nhv->hv", scores.softmax(-1), v))
    return torch.stack(out)


@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize(("heads", "page_size", "most_heads"), [(6, 1, 64), (16, 4, 64), (10, 16, 4)])
def test_decodes_over_latents_are_those_over_expanded_keys(
    latent: LatentConfig,
    heads: int,
    page_size: int,
    most_heads: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "MOST_HEADS", most_heads)
    paged = Paged([1, 129, 290], latent, page_size, device)
    weight = draw(heads, latent.nope_dim + latent.value_dim, latent.rank, device=device) * 0.3
    q = draw(3, heads, latent.nope_dim + latent.rope_dim, device=device, seed=1)
    blocks = decode.head_blocks(heads)
    work = DecodeWork(3, heads, blocks, latent.rank, device, programs=blocks * INTERPRETED_PROGRAMS)
    plan_decode(paged.lengths, work)
    assert int(work.first_item[3]) > 3, "some row is split"
    attended = decode.decode_attention(
        fast.absorb(q, weight, latent.nope_dim),
        paged.cache,
        paged.cache[..., : latent.rank],
        paged.table,
        paged.rows,
        paged.lengths,
        work,
        page_size=page_size,
        scale=0.2,
    )
    found = fast.lift(attended, weight, latent.nope_dim)
    assert_near(found, expected_decodes(q, paged, weight, latent))


@pytest.mark.parametrize("few_rows", [0, 32])
def test_parts_of_a_row_are_weighed(few_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts, and wider ones, than are read at a time; of rows with one part or none nothing is written."""
    monkeypatch.setattr(decode, "FEW_ROWS", few_rows)
    work = DecodeWork(4, 2, 1, 160, device, programs=300)
    counts = torch.tensor([70, 1, 0, 3], device=device)
    work.first_item.copy_(torch.cat((counts[:1] * 0, counts.cumsum(0))))
    work.partial.copy_(draw(*work.partial.shape, device=device))
    work.log_sums.copy_(draw(*work.log_sums.shape, device=device, seed=1) * 20)
    out = torch.full((4, 2, 160), 7.0, device=device)
    decode.weigh_parts(work, out)
    for row, (begin, count) in enumerate(zip(work.first_item.tolist(), counts.tolist(), strict=False)):
        own = slice(begin, begin + count)
        weight = torch.softmax(work.log_sums[own].double() * np.log(2.0), dim=0)
        truth = (weight[..., None] * work.partial[own].double()).sum(0)
        assert_near(out[row], truth) if count > 1 else torch.testing.assert_close(
            out[row], torch.full_like(out[row], 7.0)
        )


def test_blocks_of_heads_are_equal_and_not_too_large() -> None:
    assert [decode.head_blocks(heads) for heads in (1, 16, 64, 96, 128, 127)] == [1, 1, 1, 2, 2, 127]


@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_expanded_attention_of_ragged_rows(latent: LatentConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Rows with and without a prefix, among tokens that are not theirs; other tokens' results are left alone."""
    heads, query_lens, context_lens = 3, np.array([2, 21, 40], dtype=np.int32), [0, 30, 5]
    config = replace(fast.config_for(torch.float32), block_m=16)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    lengths = [context + int(count) for context, count in zip(context_lens, query_lens, strict=True)]
    rows = [draw(length, latent.width, device=device, dtype=dtype, seed=length) for length in lengths]
    key_starts = np.concatenate(([0], np.cumsum(lengths)))[:-1].astype(np.int32)
    weight = draw(heads, latent.nope_dim + latent.value_dim, latent.rank, device=device, dtype=dtype) * 0.3
    q = draw(int(starts[-1]), heads + 1, latent.nope_dim + latent.rope_dim, device=device, dtype=dtype, seed=1)[
        :, :heads
    ]
    read = torch.cat(rows)
    made = torch.einsum("nr,hor->nho", read[:, : latent.rank].float(), weight.float()).to(dtype).contiguous()
    blocks = query_blocks(query_lens[1:], config.block_m) + np.array([1, 0], dtype=np.int32)
    out = torch.full((int(starts[-1]), heads, latent.value_dim), 7.0, dtype=dtype, device=device)
    places = (
        torch.from_numpy(array).to(device) for array in (starts, key_starts, np.array(context_lens, np.int32), blocks)
    )
    fast.expanded_attention(q, made, read[:, latent.rank :], *places, scale=0.2, out=out, config=config)
    assert bool((out[:2] == 7.0).all()), "the first row has no blocks"
    for row in (1, 2):
        k, v = expand(rows[row].double(), weight.double(), latent)
        own = slice(int(starts[row]), int(starts[row + 1]))
        table = torch.arange(len(k))[None]
        truth = paged_attention(q[own].double(), k, v, table, [0, own.stop - own.start], [context_lens[row]], 1, 0.2)
        assert_near(out[own], truth)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("cache_type", [torch.bfloat16, torch.float8_e4m3fn])
def test_deepseeks_widths(heads: int, cache_type: torch.dtype, device: torch.device) -> None:
    """In bfloat16, with the tiles that serve: decodes by both kernels over latents, and a prompt by both forms."""
    latent = LatentConfig(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    scale, stored = 192**-0.5, 0.02
    paged = Paged([1, 700, 3000], latent, 16, device)
    cache = (paged.cache / stored).to(cache_type) if cache_type.itemsize == 1 else paged.cache.to(cache_type)
    factor = stored if cache_type.itemsize == 1 else 1.0
    rounded = [
        cache.float()[slots_of(paged, row, len(latents)), 0] * factor for row, latents in enumerate(paged.latents)
    ]
    weight = draw(heads, 256, latent.rank, device=device, dtype=torch.bfloat16) * 0.05
    q = draw(3, heads, 192, device=device, dtype=torch.bfloat16, seed=1)
    queries = fast.absorb(q, weight, latent.nope_dim)
    caches = (cache, cache[..., : latent.rank], paged.table, paged.rows)
    options = {"page_size": 16, "scale": scale, "k_scale": factor, "v_scale": factor}
    attended = decode.decode_attention(queries, *caches, paged.lengths, None, **options)
    wide = [expand(latents.double(), weight.double(), latent) for latents in rounded]
    truth = []
    for query, (k, v) in zip(q.double(), wide, strict=True):
        scores = torch.einsum("hd,nhd->hn", query, k) * scale
        truth.append(torch.einsum("hn,nhv->hv", scores.softmax(-1), v))
    assert_near(fast.lift(attended, weight, latent.nope_dim), torch.stack(truth), times=2.0)

    prompt = draw(300, heads, 192, device=device, dtype=torch.bfloat16, seed=2)  # behind 2,700 cached tokens
    lengths = np.array([300], dtype=np.int32)
    table = torch.arange(3000)[None]
    expected = paged_attention(prompt.double(), *wide[2], table, [0, 300], [2700], 1, scale)
    made = torch.einsum("nr,hor->nho", rounded[2][:, : latent.rank], weight.float()).bfloat16().contiguous()
    starts, contexts = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 300], [2700]))
    blocks = torch.from_numpy(query_blocks(lengths, fast.config_for(torch.bfloat16).block_m)).to(device)
    out = torch.empty(300, heads, latent.value_dim, dtype=torch.bfloat16, device=device)
    shared = rounded[2][:, latent.rank :].bfloat16()
    fast.expanded_attention(prompt, made, shared, starts, starts[:1], contexts, blocks, scale=scale, out=out)
    assert_near(out, expected, times=2.0)

    config = invariant.config_for(heads, 1, latent.rank, torch.bfloat16)
    items = torch.from_numpy(prefill_items(lengths, lengths * 0 + 2700, config.block_queries, 0)).to(device)
    nothing = torch.empty(0, device=device)
    attended = invariant.invariant_attention(
        fast.absorb(prompt, weight, latent.nope_dim),
        *caches[:3],
        paged.rows[2:],
        starts,
        contexts + 300,
        items,
        programs=len(items) - 1,
        partials=Partials(nothing, nothing, nothing),
        split_rows=0,
        config=config,
        **options,
    )
    assert_near(fast.lift(attended, weight, latent.nope_dim), expected, times=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_deepseeks_widths_have_the_same_bits_in_a_prompt_and_alone(heads: int, device: torch.device) -> None:
    rank, tokens, length = 512, 100, 1300
    config = invariant.config_for(heads, 1, rank, torch.bfloat16)
    cache = draw(length + 1, 1, 576, device=device, dtype=torch.bfloat16)
    table = (torch.arange(length, dtype=torch.int32, device=device) + 1)[None].expand(tokens, -1).contiguous()
    q = draw(tokens, heads, 576, device=device, dtype=torch.bfloat16, seed=1)
    places = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    work = DecodeItems(tokens, heads, rank, device, chunk=config.chunk)

    def attend(
        rows: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, items: torch.Tensor, split: int
    ) -> torch.Tensor:
        caches = (cache, cache[..., :rank], table, rows, starts, lengths, items)
        shared = {"programs": len(items) - 1, "partials": work.partials, "split_rows": split, "page_size": 1}
        return invariant.invariant_attention(q, *caches, scale=0.07, config=config, **shared)  # type: ignore[arg-type]

    lens = np.array([tokens], dtype=np.int32)
    items = torch.from_numpy(prefill_items(lens, lens * 0 + length - tokens, config.block_queries, 0)).to(device)
    whole = attend(places[:1], places[[0, tokens]].contiguous(), places[:1] + length, items, 0)
    lengths = places[1:] + length - tokens
    work.plan(lengths)
    assert torch.equal(attend(places[:-1], places, lengths, work.items, tokens), whole)


def slots_of(paged: Paged, row: int, length: int) -> torch.Tensor:
    place = torch.arange(length, device=paged.table.device)
    pages = paged.table[paged.rows[row].long()].long()
    return pages[place // paged.page_size] * paged.page_size + place % paged.page_size
