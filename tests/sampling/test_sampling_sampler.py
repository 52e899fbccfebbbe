"""Whole steps: what is drawn, how often, that company does not matter, and that a bad row fails alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import adjusted_logits, kept_tokens, make_setup, softmax
from torch import Tensor

from bough.core.plan import LogprobSpec
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState

CHI_SQUARE_P_001 = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}  # by degrees of freedom


def randn(rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def rows_of(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int32)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1e-7}, {"top_k": 1, "temperature": 5.0}])
def test_greedy_is_argmax(params: dict[str, Any]) -> None:
    state = SamplingState(8, 1000, "cpu")
    state.setup([make_setup(row, **params) for row in range(8)])
    logits = randn(8, 1000)
    logits[2, [5, 9]] = 100.0  # the first of equals
    sampled = sample(state, logits, np.arange(8, dtype=np.int32))
    assert torch.equal(sampled.tokens, logits.argmax(-1))
    assert int(sampled.tokens[2]) == 5
    assert not sampled.bad.any()
    assert sampled.tokens.dtype == torch.int64


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_frequencies_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    line, count = randn(1, 8, seed=5, scale=1.0), 4000
    state = SamplingState(count, 8, "cpu")
    state.setup([make_setup(row, seed=11, generated=row, **params) for row in range(count)])  # one row per position
    tokens = sample(state, line.repeat(count, 1), np.arange(count, dtype=np.int32)).tokens
    probs = softmax(line[0].double().numpy() / params["temperature"])
    kept = sorted(kept_tokens(probs, params.get("top_k", -1), params.get("top_p", 1.0), params.get("min_p", 0.0)))
    expected = probs[kept] / probs[kept].sum() * count
    found = np.bincount(tokens.numpy(), minlength=8)
    assert found[kept].sum() == count
    assert ((found[kept] - expected) ** 2 / expected).sum() < CHI_SQUARE_P_001[len(kept) - 1]


COMPANIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20},
    {"temperature": 1.5, "top_k": 400, "top_p": 0.97, "min_p": 0.01},
    {"min_p": 0.05},
    {"logit_bias": {7: 5.0}, "top_p": 0.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(range(8)), st.integers(0, 2**62)), min_size=1, max_size=9), st.randoms())
def test_company_and_place_do_not_matter(rows: list[tuple[int, int]], shuffler: Any) -> None:
    vocab_size = 1000
    logits = randn(len(rows), vocab_size, seed=1)
    alone = []
    for place, (kind, seed) in enumerate(rows):
        state = SamplingState(1, vocab_size, "cpu")
        state.setup([make_setup(0, seed=seed, generated=3, prompt=[1, 2], **COMPANIONS[kind])])
        alone.append(int(sample(state, logits[place : place + 1].clone(), rows_of(0)).tokens))
    state = SamplingState(20, vocab_size, "cpu")
    numbers = shuffler.sample(range(20), len(rows))
    state.setup(
        [
            make_setup(number, seed=seed, generated=3, prompt=[1, 2], **COMPANIONS[kind])
            for number, (kind, seed) in zip(numbers, rows, strict=True)
        ]
    )
    order = shuffler.sample(range(len(rows)), len(rows))
    sampled = sample(state, logits[order].clone(), rows_of(*(numbers[i] for i in order)))
    assert sampled.tokens.tolist() == [alone[i] for i in order]


def test_seed_and_position_decide() -> None:
    state, logits = SamplingState(4, 5000, "cpu"), randn(1, 5000, scale=0.1).repeat(4, 1)
    state.setup(
        [make_setup(0, seed=1), make_setup(1, seed=1), make_setup(2, seed=2), make_setup(3, seed=1, generated=1)]
    )
    first = sample(state, logits, rows_of(0, 1, 2, 3)).tokens.tolist()
    second = sample(state, logits, rows_of(0, 1, 2, 3)).tokens.tolist()
    assert first[0] == first[1]
    assert len({first[0], first[2], second[0]}) == 3
    assert second[0] == first[3]


@pytest.mark.parametrize(
    "others", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}]
)
def test_bad_rows_fail_alone(others: dict[str, Any]) -> None:
    vocab_size = 300
    clean = randn(6, vocab_size)
    dirty = clean.clone()
    dirty[0, 17] = torch.nan
    dirty[2, 100] = torch.inf
    dirty[3] = -torch.inf
    dirty[5] = torch.nan
    results = []
    for logits in (clean, dirty):
        state = SamplingState(6, vocab_size, "cpu")
        state.setup([make_setup(row, seed=row, **others) for row in range(6)])
        results.append(sample(state, logits, np.arange(6, dtype=np.int32)))
    assert results[1].bad.tolist() == [True, False, True, True, False, True]
    assert not results[0].bad.any()
    assert results[1].tokens[[0, 2, 3, 5]].tolist() == [0, 0, 0, 0]
    assert torch.equal(results[1].tokens[[1, 4]], results[0].tokens[[1, 4]])


def test_a_masked_row_is_not_bad() -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 299] = -5.0
    choices: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5, "top_k": 10}]
    for params in choices:
        state = SamplingState(1, 300, "cpu")
        state.setup([make_setup(0, **params)])
        sampled = sample(state, logits.clone(), rows_of(0))
        assert (int(sampled.tokens), bool(sampled.bad)) == (299, False)


PENALISED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.9},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.0, "frequency_penalty": -0.3, "repetition_penalty": 1.2, "logit_bias": {3: 4.0, 9: -9.0}},
]


@pytest.mark.parametrize("penalty", [1e-37, 1e-38, 1e-320])
def test_the_smallest_penalties_leave_numbers_finite(penalty: float) -> None:
    state = SamplingState(1, 40, "cpu")
    state.setup([make_setup(0, prompt=[3], repetition_penalty=penalty, logit_bias={3: 1e9})])
    sampled = sample(state, randn(1, 40, seed=0, scale=9.0), rows_of(0))
    assert (int(sampled.tokens), bool(sampled.bad)) == (3, False)


@pytest.mark.parametrize("params", PENALISED)
def test_penalties_follow_the_reference_through_steps(params: dict[str, Any]) -> None:
    state, prompt, output = SamplingState(3, 40, "cpu"), [1, 1, 2, 30], list[int]()
    setup = make_setup(1, prompt=prompt, temperature=0.0, **params)
    state.setup([make_setup(0), setup])
    for step in range(30):
        logits = randn(2, 40, seed=step % 3, scale=1.0)
        expected = adjusted_logits(logits[1].double().numpy(), setup.sampling, prompt, output).argmax()
        token = int(sample(state, logits, rows_of(0, 1)).tokens[1])
        assert token == expected
        output.append(token)


@pytest.mark.parametrize("params", [*PENALISED, {"min_new_tokens": 9, "stop_ids": (4, 5)}, {"top_p": 0.9}])
def test_a_row_set_up_again_with_its_history_goes_on_as_if_undisturbed(params: dict[str, Any]) -> None:
    prompt, steps = [3, 3, 8], 14

    def run(retract_at: int | None) -> list[int]:
        state, row, output = SamplingState(3, 40, "cpu"), 0, list[int]()
        state.setup([make_setup(row, seed=77, prompt=prompt, output=output, temperature=1.2, **params)])
        for step in range(steps):
            if step == retract_at:
                state.release(rows_of(row))
                row = 2
                state.setup([make_setup(row, seed=77, prompt=prompt, output=output, temperature=1.2, **params)])
            output.append(int(sample(state, randn(1, 40, seed=step, scale=1.0), rows_of(row)).tokens))
        return output

    undisturbed = run(None)
    assert run(1) == undisturbed
    assert run(10) == undisturbed


def test_stop_ids_are_barred_until_min_new_tokens() -> None:
    state = SamplingState(3, 50, "cpu")
    shape: dict[str, Any] = {"temperature": 0.0, "stop_ids": (7, 8, 999)}
    state.setup(
        [
            make_setup(0, min_new_tokens=3, **shape),
            make_setup(1, **shape),
            make_setup(2, min_new_tokens=3, generated=2, temperature=0.0, stop_ids=(7,)),
        ]
    )
    logits = torch.zeros(3, 50)
    logits[:, 7], logits[:, 8], logits[:, 20] = 9.0, 8.0, 7.0
    found = [sample(state, logits.clone(), rows_of(0, 1, 2)).tokens.tolist() for _ in range(4)]
    assert found == [[20, 7, 8], [20, 7, 7], [20, 7, 7], [7, 7, 7]]


def test_a_row_past_its_minimum_asks_for_nothing_special() -> None:
    state = SamplingState(2, 50, "cpu")
    state.setup([make_setup(row, min_new_tokens=2, stop_ids=(7,), temperature=0.0) for row in range(2)])
    sample(state, torch.zeros(2, 50), rows_of(0, 1))
    assert not state.plain(rows_of(0)) and not state.plain(rows_of(1))
    sample(state, torch.zeros(1, 50), rows_of(0))
    assert state.plain(rows_of(0)) and not state.plain(rows_of(1)) and state.flags.adjusted(rows_of(1)).all()
    state.setup([make_setup(1, stop_ids=(7,))])  # the next request on that row
    sample(state, torch.zeros(1, 50), rows_of(1))
    assert not state.flags.adjusted(rows_of(0, 1)).any()


def test_a_bar_that_falls_leaves_the_penalties() -> None:
    state = SamplingState(1, 50, "cpu")
    shape: dict[str, Any] = {"min_new_tokens": 1, "stop_ids": (7,), "temperature": 0.0, "frequency_penalty": 2.0}
    state.setup([make_setup(0, prompt=[1], **shape)])
    logits = torch.zeros(1, 50)
    logits[0, 7], logits[0, 20] = 9.0, 8.0
    found = [sample(state, logits.clone(), rows_of(0)).tokens.tolist() for _ in range(3)]
    assert found == [[20], [7], [7]] and state.flags.adjusted(rows_of(0)).all()


def test_wider_stop_lines_keep_the_narrow_ones() -> None:
    state = SamplingState(2, 50, "cpu")
    state.setup([make_setup(0, min_new_tokens=3, temperature=0.0, stop_ids=(7,))])
    state.setup([make_setup(1, min_new_tokens=3, temperature=0.0, stop_ids=(1, 2, 3))])
    logits = torch.zeros(2, 50)
    logits[:, 7], logits[:, 0] = 9.0, 8.0
    assert sample(state, logits, rows_of(0, 1)).tokens.tolist() == [0, 7]


def test_logit_bias() -> None:
    state = SamplingState(2, 50, "cpu")
    state.setup(
        [make_setup(0, temperature=0.0, logit_bias={4: 100.0, 7: -100.0, 5000: 1.0}), make_setup(1, temperature=0.0)]
    )
    logits = torch.zeros(2, 50)
    logits[:, 7] = 50.0
    assert sample(state, logits, rows_of(0, 1)).tokens.tolist() == [4, 7]


def test_logits_of_rows_that_want_logprobs_are_left_alone() -> None:
    state = SamplingState(2, 50, "cpu")
    state.setup([make_setup(0, logit_bias={4: 9.0}, logprobs=LogprobSpec()), make_setup(1, logit_bias={4: 9.0})])
    logits = randn(2, 50)
    before = logits.clone()
    sample(state, logits, rows_of(0, 1))
    assert torch.equal(logits, before)
    assert state.specs(rows_of(1, 0)) == [None, LogprobSpec()]
    assert state.specs(rows_of(1)) is None


def test_an_empty_batch_is_legal() -> None:
    sampled = sample(SamplingState(2, 50, "cpu"), torch.zeros(0, 50), rows_of())
    assert (len(sampled.tokens), len(sampled.bad)) == (0, 0)
