"""Tokens drawn by the native kernels are those of the definition, whatever the filters."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.plan import LogprobSpec, RowSetup
from bough.core.sampling_params import SamplingParams
from bough.executor.native_sampling import NativeSampler
from bough.kernels.logits.reference import forbid_tokens_
from bough.native.library import load_library
from bough.native.tape import ThreadPool
from bough.sampling.masks import BatchMasks
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState
from tests.kernels.references.sampling import sample_rows

VOCAB = 1003
NO_PAGES = (np.zeros(0, dtype=np.int32),)
FILTERS: dict[str, dict[str, float]] = {
    "top-p": {"top_p": 0.9},
    "small top-p": {"top_p": 0.01},
    "top-k": {"top_k": 20},
    "top-k of one": {"top_k": 1},
    "most of the vocabulary": {"top_k": VOCAB - 1, "top_p": 0.999},
    "top-k, top-p": {"top_k": 40, "top_p": 0.7},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 300, "top_p": 0.95, "min_p": 0.01},
}


def state_of(params: list[SamplingParams], logprobs: LogprobSpec | None = None) -> SamplingState:
    state = SamplingState(len(params), VOCAB, "cpu")
    state.setup([RowSetup(i, p, 7 + i, NO_PAGES, 0, 0, None, 0, logprobs, ()) for i, p in enumerate(params)])
    return state


@pytest.mark.parametrize("temperatures", [[0.0] * 5, [0.0, 0.7, 1.0, 1.5, 0.01]], ids=["greedy", "mixed"])
def test_the_same_tokens_as_torch(any_tier: ctypes.CDLL, temperatures: list[float]) -> None:
    params = [SamplingParams(temperature=t) for t in temperatures]
    native, reference = state_of(params), state_of(params)
    sampler = NativeSampler(native, ThreadPool(any_tier, 2))
    rows = np.array([3, 0, 4, 1, 2], dtype=np.int32)
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        logits = torch.randn(5, VOCAB, generator=generator) * 3
        expected = sample(reference, logits.clone(), rows)
        found = sampler(logits, rows)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert not found.bad.any()
    assert native.parameters.generated.tolist() == reference.parameters.generated.tolist()


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_filtered_rows_are_the_definitions(any_tier: ctypes.CDLL, filters: dict[str, float], spread: float) -> None:
    params = [SamplingParams(temperature=t, **filters) for t in (0.3, 1.0, 2.0)]
    native, reference = state_of(params), state_of(params)
    sampler, rows = NativeSampler(native, ThreadPool(any_tier, 2)), np.arange(3, dtype=np.int32)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = torch.randn(3, VOCAB, generator=generator) * spread
        expected, _ = sample_rows(logits, torch.arange(3), reference.parameters, filtered=True)
        assert sampler(logits, rows).tokens.tolist() == expected.tolist()


@settings(deadline=None, max_examples=60)
@given(
    levels=st.lists(st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 1.0, 1.5, 9.0]), min_size=40, max_size=40),
    top_k=st.integers(1, 60),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**63 - 1),
)
def test_equal_logits_rank_by_id(levels: list[float], top_k: int, top_p: float, seed: int) -> None:
    """With few different logits, most cuts fall between equal ones."""
    library = load_library()
    if library is None:
        pytest.skip("the native kernels are not compiled")
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 100:140] = torch.tensor(levels, dtype=torch.float32)
    logits[0, 7] = 0.5
    parameters = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p)
    states = [SamplingState(1, VOCAB, "cpu") for _ in range(2)]
    for state in states:
        state.setup([RowSetup(0, parameters, seed, NO_PAGES, 0, 0, None, 0, None, ())])
    expected, _ = sample_rows(logits, torch.arange(1), states[1].parameters, filtered=True)
    found = NativeSampler(states[0], ThreadPool(library, 1))(logits, np.zeros(1, dtype=np.int32))
    assert found.tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_sampled_fail_alone(any_tier: ctypes.CDLL, temperature: float, top_p: float) -> None:
    params = [SamplingParams(temperature=temperature, top_p=top_p)] * 5
    sampler = NativeSampler(state_of(params), ThreadPool(any_tier, 1))
    logits = torch.zeros(5, VOCAB)
    logits[0, 700], logits[1, 1002], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[3, 1001] = 2.0
    found = sampler(logits, np.arange(5, dtype=np.int32))
    assert found.bad.tolist() == [True, True, True, False, False]
    assert found.tokens[:4].tolist() == [0, 0, 0, 1001]


def random_masks(masked: list[bool], allowed: float, seed: int) -> BatchMasks:
    """Lines for the masked rows; the last bits stand for no token, and may be anything."""
    words = -(-VOCAB // 32)
    bits = np.random.default_rng(seed).random((sum(masked), 32 * words)) < allowed
    bits[:, 17] = True  # something must be possible
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    places = torch.from_numpy(np.flatnonzero(masked))
    return BatchMasks(np.array(masked), places, torch.from_numpy(packed))


@pytest.mark.parametrize("allowed", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=["all", "top-p"])
def test_masked_rows_draw_among_what_is_allowed(
    any_tier: ctypes.CDLL, allowed: float, filters: dict[str, float]
) -> None:
    params = [SamplingParams(temperature=t, **filters) for t in (0.0, 1.0, 2.0, 1.0)]
    native, reference = state_of(params), state_of(params)
    sampler, rows = NativeSampler(native, ThreadPool(any_tier, 2)), np.array([2, 0, 3, 1], dtype=np.int32)
    generator = torch.Generator().manual_seed(5)
    for step in range(10):
        masks = random_masks([True, False, True, True], allowed, step)
        logits = torch.randn(4, VOCAB, generator=generator) * 3
        forbidden = logits.clone()
        forbid_tokens_(forbidden, masks.words, masks.places)
        expected, _ = sample_rows(forbidden, torch.from_numpy(rows).long(), reference.parameters, filtered=True)
        assert sampler(logits, rows, masks).tokens.tolist() == expected.tolist()
        assert torch.equal(logits, forbidden)
    assert sampler(torch.zeros(4, VOCAB), rows).tokens.tolist()[1] == 0, "the next step has no masks"


def test_a_mask_that_allows_nothing_is_bad_for_its_row_alone(any_tier: ctypes.CDLL) -> None:
    sampler = NativeSampler(state_of([SamplingParams(temperature=0.0)] * 2), ThreadPool(any_tier, 1))
    words = torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32)
    masks = BatchMasks(np.array([False, True]), torch.tensor([1]), words)
    assert sampler(torch.ones(2, VOCAB), np.arange(2, dtype=np.int32), masks).bad.tolist() == [False, True]


def test_masks_work_on_a_copy_where_logprobs_are_wanted(any_tier: ctypes.CDLL) -> None:
    sampler = NativeSampler(state_of([SamplingParams(temperature=0.0)], LogprobSpec()), ThreadPool(any_tier, 1))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    found = sampler(logits, np.zeros(1, dtype=np.int32), random_masks([True], 0.0, 0))
    assert found.tokens.tolist() == [17] and torch.equal(logits, before)


def test_rows_that_adjust_their_logits_are_drawn_from_those(any_tier: ctypes.CDLL) -> None:
    params = [SamplingParams(temperature=0.0, logit_bias={5: 100.0}), SamplingParams(temperature=0.0)]
    sampler = NativeSampler(state_of(params), ThreadPool(any_tier, 1))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    best = int(logits[1].argmax())
    assert sampler(logits, np.arange(2, dtype=np.int32)).tokens.tolist() == [5, best]


def test_logits_are_left_as_they_are_for_logprobs(any_tier: ctypes.CDLL) -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.8)]
    sampler = NativeSampler(state_of(params, LogprobSpec()), ThreadPool(any_tier, 1))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    sampler(logits, np.zeros(1, dtype=np.int32))
    assert torch.equal(logits, before)
