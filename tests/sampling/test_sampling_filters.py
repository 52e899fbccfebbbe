"""Each filter keeps exactly the tokens that a float64 reference keeps, ties and flat rows included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import kept_tokens, softmax
from torch import Tensor

from bough.sampling.sampler import draw, keep_min_p, keep_top, softmax_weights


def weights_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return softmax_weights(logits, logits.amax(dim=-1), torch.full((len(logits),), temperature))


def filtered(logits: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> list[set[int]]:
    vocab_size = logits.shape[1]
    weights = weights_of(logits)
    k = torch.tensor([value if value > 0 else vocab_size for value in top_k])
    keep_top(weights, k, torch.tensor(top_p, dtype=torch.float64))
    keep_min_p(weights, torch.tensor(min_p))
    return [set(row.nonzero().flatten().tolist()) for row in weights]


# Values on a coarse grid make ties common; the row's sum stays far from rounding's reach of a multiple of top_p.
grid_logits = st.lists(st.integers(-20, 20).map(lambda value: value / 4), min_size=1, max_size=300)
limits = st.tuples(
    st.sampled_from([-1, 2, 3, 5, 50, 250]),
    st.sampled_from([1.0, 0.95, 0.7, 0.31, 0.01]),
    st.sampled_from([0.0, 0.043, 0.61]),
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 2**32), st.integers(1, 8), limits), min_size=1, max_size=6), st.data())
def test_kept_sets(rows: list[tuple[int, int, tuple[int, float, float]]], data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 2, 7, 127, 128, 129, 300, 5000]))
    lines = []
    for seed, spread, _ in rows:
        generator = np.random.default_rng(seed)
        lines.append(np.round(generator.normal(size=vocab_size) * spread, data.draw(st.sampled_from([0, 1, 6]))))
    logits = torch.tensor(np.array(lines), dtype=torch.float32)
    found = filtered(logits, *(list(column) for column in zip(*(limit for _, _, limit in rows), strict=True)))
    for line, (_, _, (top_k, top_p, min_p)), kept in zip(logits.double().numpy(), rows, found, strict=True):
        assert kept == kept_tokens(softmax(line), top_k, top_p, min_p)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(grid_logits, st.integers(1, 300))
def test_top_k_keeps_exactly_k_and_the_lower_ids_among_ties(line: list[float], top_k: int) -> None:
    [kept] = filtered(torch.tensor([line]), [top_k], [1.0], [0.0])
    order = sorted(range(len(line)), key=lambda token: (-line[token], token))
    assert kept == set(order[:top_k])


@pytest.mark.parametrize("top_p", [0.1, 0.2, 0.5, 0.8, 0.9])
def test_top_p_is_exact_on_equal_tokens(top_p: float) -> None:
    [kept] = filtered(torch.zeros(1, 10), [-1], [top_p], [0.0])
    assert kept == set(range(round(top_p * 10)))


def test_top_p_always_keeps_one() -> None:
    assert filtered(torch.tensor([[0.0, 5.0, 1.0]]), [-1], [1e-9], [1.0]) == [{1}]


def test_top_p_counts_what_top_k_left() -> None:
    # Of 0.4, 0.3, 0.2, 0.1 the best two are 4/7 and 3/7: the first alone reaches a half only once renormalised.
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert filtered(logits, [2], [0.5], [0.0]) == [{0}]
    assert filtered(logits, [-1], [0.5], [0.0]) == [{0, 1}]


def test_masked_tokens_are_never_kept() -> None:
    logits = torch.full((1, 500), -torch.inf)
    logits[0, [3, 400]] = torch.tensor([1.0, 1.0])
    assert filtered(logits, [100], [0.99], [0.0]) == [{3, 400}]


def test_draw_is_the_inverse_of_the_cumulative_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(50, 1024, generator=generator) * (torch.rand(50, 1024, generator=generator) < 0.3)
    numbers = torch.rand(50, generator=generator, dtype=torch.float64)
    numbers[:2] = torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64)
    tokens = draw(weights, numbers)
    mass = weights.double().cumsum(-1)
    expected = torch.searchsorted(mass, (numbers * mass[:, -1])[:, None], right=True).squeeze(1)
    assert torch.equal(tokens, expected)
    assert bool((weights.gather(1, tokens[:, None]) > 0).all())


def test_weights_are_softmax_numerators_at_any_temperature() -> None:
    logits = torch.tensor([[3e38, 1.0, -3e38], [2.0, 1.0, 0.0]])
    weights = weights_of(logits, temperature=2e-6)
    assert weights[:, :3].tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert weights_of(logits, temperature=2.0)[1, :3].tolist() == pytest.approx([1.0, np.exp(-0.5), np.exp(-1.0)])
