"""Tokens drawn by the native kernels are those that torch draws."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from bough.core.plan import RowSetup
from bough.core.sampling_params import SamplingParams
from bough.executor.native_sampling import NativeSampler
from bough.native.tape import Crew
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState

VOCAB = 1003
NO_PAGES = (np.zeros(0, dtype=np.int32),)


def state_of(params: list[SamplingParams]) -> SamplingState:
    state = SamplingState(len(params), VOCAB, "cpu")
    state.setup([RowSetup(i, p, 7 + i, NO_PAGES, 0, 0, None, 0, None, ()) for i, p in enumerate(params)])
    return state


@pytest.mark.parametrize("temperatures", [[0.0] * 5, [0.0, 0.7, 1.0, 1.5, 0.01]], ids=["greedy", "mixed"])
def test_the_same_tokens_as_torch(any_tier: ctypes.CDLL, temperatures: list[float]) -> None:
    params = [SamplingParams(temperature=t) for t in temperatures]
    native, reference = state_of(params), state_of(params)
    sampler = NativeSampler(native, Crew(any_tier, 2))
    rows = np.array([3, 0, 4, 1, 2], dtype=np.int32)
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        logits = torch.randn(5, VOCAB, generator=generator) * 3
        expected = sample(reference, logits.clone(), rows)
        found = sampler(logits, rows)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert not found.bad.any()
    assert native.generated.tolist() == reference.generated.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_sampled_fail_alone(any_tier: ctypes.CDLL, temperature: float) -> None:
    sampler = NativeSampler(state_of([SamplingParams(temperature=temperature)] * 5), Crew(any_tier, 1))
    logits = torch.zeros(5, VOCAB)
    logits[0, 700], logits[1, 1002], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[3, 1001] = 2.0
    found = sampler(logits, np.arange(5, dtype=np.int32))
    assert found.bad.tolist() == [True, True, True, False, False]
    assert found.tokens[:4].tolist() == [0, 0, 0, 1001]


def test_rows_with_filters_are_drawn_by_torch(any_tier: ctypes.CDLL) -> None:
    params = [SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1.0)]
    sampler = NativeSampler(state_of(params), Crew(any_tier, 1))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    assert sampler(logits.clone(), np.arange(2, dtype=np.int32)).tokens[0] == logits[0].argmax()
