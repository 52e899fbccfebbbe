"""Sampling under grammars: nothing that is not allowed, the same random numbers, and untouched logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_reference import make_setup

from bough.core.plan import LogprobSpec
from bough.sampling.masks import BatchMasks
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState

VOCAB = 100


def masks_of(allowed: dict[int, list[int]], rows: int) -> BatchMasks:
    """By place in the batch, the tokens that may come."""
    bits = np.zeros((len(allowed), 128), dtype=np.uint8)
    for line, tokens in zip(bits, allowed.values(), strict=True):
        line[tokens] = 1
    masked = np.zeros(rows, dtype=np.bool_)
    masked[list(allowed)] = True
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return BatchMasks(masked, torch.from_numpy(np.flatnonzero(masked)), torch.from_numpy(words))


def randn(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 2, "top_p": 0.9},
        {"min_p": 0.3, "logit_bias": {5: 50.0}},
        {"min_new_tokens": 3, "stop_ids": (8,), "temperature": 0.5, "logit_bias": {8: 9.0}},
    ],
)
def test_only_allowed_tokens_come_and_other_rows_do_not_notice(params: dict[str, Any]) -> None:
    rows = np.arange(4, dtype=np.int32)
    found = []
    for masks in (None, masks_of({1: [7, 8, 9], 3: [40]}, 4)):
        state = SamplingState(4, VOCAB, "cpu")
        state.setup([make_setup(row, seed=row, **params) for row in range(4)])
        sampled = sample(state, randn(4), rows, masks)
        assert not sampled.bad.any()
        found.append(sampled.tokens.tolist())
    free, masked = found
    assert masked[1] in (7, 8, 9) and masked[3] == 40
    assert [masked[0], masked[2]] == [free[0], free[2]]


def test_a_mask_that_allows_all_changes_nothing() -> None:
    for masks in (None, masks_of({0: list(range(VOCAB)), 1: list(range(VOCAB))}, 2)):
        state = SamplingState(2, VOCAB, "cpu")
        state.setup([make_setup(row, seed=5) for row in range(2)])
        tokens = sample(state, randn(2), np.arange(2, dtype=np.int32), masks).tokens.tolist()
        assert tokens == sample_alone()


def sample_alone() -> list[int]:
    state = SamplingState(2, VOCAB, "cpu")
    state.setup([make_setup(row, seed=5) for row in range(2)])
    return sample(state, randn(2), np.arange(2, dtype=np.int32)).tokens.tolist()


def test_a_row_that_may_say_nothing_fails_alone() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    state.setup([make_setup(row) for row in range(2)])
    sampled = sample(state, randn(2), np.arange(2, dtype=np.int32), masks_of({0: []}, 2))
    assert sampled.bad.tolist() == [True, False]


@pytest.mark.parametrize("params", [{}, {"logit_bias": {3: 1.0}}])
def test_logits_stay_the_models_own_where_logprobs_are_wanted(params: dict[str, Any]) -> None:
    state = SamplingState(2, VOCAB, "cpu")
    state.setup([make_setup(0, logprobs=LogprobSpec(2), **params), make_setup(1)])
    logits = randn(2)
    before = logits.clone()
    sampled = sample(state, logits, np.arange(2, dtype=np.int32), masks_of({0: [11]}, 2))
    assert int(sampled.tokens[0]) == 11 and torch.equal(logits[0], before[0])
