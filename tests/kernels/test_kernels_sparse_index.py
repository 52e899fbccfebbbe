"""The index of sparse attention: its store against the formula in float64, and its choice against sorted scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.sparse_index import reference
from bough.kernels.sparse_index import triton as fast
from tests.kernels.closeness import assert_near

IMPLEMENTATIONS = [pytest.param(reference, id="reference"), pytest.param(fast, id="triton")]
EPS = 1e-6


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim", "rope_dim"), [(1, 16, 16), (11, 14, 6)])
def test_store(
    module: object, dtype: torch.dtype, heads: int, head_dim: int, rope_dim: int, device: torch.device
) -> None:
    """Queries and keys are parts of projections; slots that are not named keep what they hold."""
    tokens = 5
    projected = draw(tokens, heads * head_dim + head_dim, device=device, dtype=dtype)
    weight, bias = draw(2, head_dim, device=device, dtype=dtype, seed=1)
    angle = draw(50, rope_dim // 2, device=device, seed=2) * 3
    positions, slots = torch.tensor([3, 49, 0, 7, 7], device=device), torch.tensor([4, 0, 8, 2, 6], device=device)
    cache = torch.full((10, head_dim), 7.0, dtype=dtype, device=device)
    q, k = projected[:, : heads * head_dim].view(tokens, heads, head_dim), projected[:, heads * head_dim :]

    def turned(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (part.double()[positions, None] for part in (angle.cos(), angle.sin()))
        a, b = x[..., :rope_dim].chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rope_dim:]), dim=-1)

    expected_q, wide = turned(q.double()), k.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double() + bias.double()
    store: Callable[..., None] = module.index_store_  # type: ignore[attr-defined]
    store(q, k, weight, bias, EPS, angle.cos(), angle.sin(), positions, slots, cache)
    assert_near(q, expected_q)
    assert_near(cache[slots], turned(normed[:, None])[:, 0])
    others = [slot for slot in range(10) if slot not in slots.tolist()]
    assert bool((cache[others] == 7.0).all())


def test_scores_are_weighted_sums_of_what_is_above_zero() -> None:
    q, weights = draw(4, 3, 6, device=torch.device("cpu")), draw(4, 3, device=torch.device("cpu"), seed=1)
    keys = draw(9, 6, device=torch.device("cpu"), seed=2)
    expected = torch.zeros(4, 9)
    for query, head, key in torch.cartesian_prod(torch.arange(4), torch.arange(3), torch.arange(9)).tolist():
        expected[query, key] += weights[query, head] * max(0.0, float(q[query, head] @ keys[key]))
    torch.testing.assert_close(reference.index_scores(q, weights, keys), expected)


def slots_of(table: torch.Tensor, row: int, length: int, page_size: int) -> torch.Tensor:
    place = torch.arange(length, device=table.device)
    return table[row, place // page_size].long() * page_size + place % page_size


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("top", "at_once"), [(8, 1 << 26), (21, 70)])
def test_the_best_slots_are_chosen(
    page_size: int, top: int, at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where scores are computed for some tokens at a time, and looked at in several blocks."""
    monkeypatch.setattr(fast, "MAX_SCORES", at_once)
    monkeypatch.setattr(fast, "BLOCK_SCORES", 32)
    monkeypatch.setattr(fast, "PROGRAMS", 12)
    lengths = [70, 1, 45, 46, top, top + 1, 32, 64]
    rows = [0, 1, 2, 2, 0, 1, 2, 1]
    q, weights = draw(8, 5, 14, device=device), draw(8, 12, device=device, seed=1)[:, 3:8]
    cache = torch.full((400, 14), float("nan"), device=device)
    pages = torch.randperm(216 // page_size, generator=torch.Generator().manual_seed(3))
    table = pages.view(3, -1).int().to(device)
    held = torch.cat([slots_of(table, row, 72, page_size) for row in range(3)])
    cache[held] = draw(len(held), 14, device=device, seed=2)
    at = [torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, lengths)]
    chosen = fast.choose_slots(q, weights, cache, table, *at, top, page_size=page_size)
    for token, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        slots, count = slots_of(table, row, length, page_size), min(top, length)
        scores = reference.index_scores(q[token, None], weights[token, None], cache[slots])[0]
        best = scores.topk(count).indices.sort().values
        assert chosen[token, :count].tolist() == slots[best].tolist()


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_of_equal_scores_the_first_are_taken(weight: float, device: torch.device) -> None:
    """Scores above, below and at zero, where most are when no head finds anything."""
    cache = torch.tensor([[0.0], [3.0], [-1.0], [1.0], [1.0], [0.0], [1.0], [1.0]], device=device).expand(-1, 16)
    table, zero = (torch.arange(size, dtype=torch.int32, device=device) for size in (8, 1))
    q, weights = torch.ones(1, 2, 16, device=device), torch.full((1, 2), weight, device=device)
    chosen = fast.choose_slots(q, weights, cache.contiguous(), table[None], zero, zero + 8, 4, page_size=1)
    assert chosen.tolist() == ([[1, 3, 4, 6]] if weight > 0 else [[0, 2, 3, 5]])


def test_a_stand_in_takes_the_place_of_what_must_not_be_chosen() -> None:
    scores = torch.tensor([[1.0, 5.0, 2.0, 4.0], [1.0, 3.0, -torch.inf, -torch.inf]])
    chosen = reference.choose(scores, 3)
    assert [set(line) for line in chosen.tolist()] == [{1, 2, 3}, {0, 1}]
    mask = reference.hide_others(chosen, 4, torch.float32)
    assert torch.equal(mask == 0, torch.tensor([[False, True, True, True], [True, True, False, False]]))
    assert bool(((mask == 0) | (mask == -torch.inf)).all())
