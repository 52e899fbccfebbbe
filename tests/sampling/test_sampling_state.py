"""Slots are lent, returned, cleaned and never leaked, and it is known who is plain, whatever the order of setups and
releases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import make_setup

from bough.core.plan import LogprobSpec
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState

KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.1},
    {"frequency_penalty": 0.3},
    {"logit_bias": {1: 2.0}},
    {"logit_bias": {1: 2.0}, "repetition_penalty": 1.1, "presence_penalty": 0.5},
]


def lines_of(state: SamplingState, rows: int) -> tuple[set[int], set[int], set[int]]:
    """The rows with a line of counts, of their prompts' tokens and of a bias."""
    numbers = np.arange(rows, dtype=np.int32)
    lines = state.penalty_lines(numbers.astype(np.int64), numbers)
    counts, prompts, bias = (
        set(each.tolist()) - {-1} for each in (lines.count_slots, lines.prompt_slots, lines.bias_slots)
    )
    return counts, prompts, bias


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from([None, *range(len(KINDS))])), max_size=40))
def test_lines_follow_the_rows_that_need_them(actions: list[tuple[int, int | None]]) -> None:
    state, held = SamplingState(12, 30, "cpu"), dict[int, dict[str, Any]]()
    for row, kind in actions:
        if kind is None:
            state.release(np.array([row], dtype=np.int32))
            held.pop(row, None)
        else:
            state.setup([make_setup(row, prompt=[1, 2], **KINDS[kind])])
            held[row] = KINDS[kind]
        counts, prompts, bias = lines_of(state, 12)
        assert bias == {row for row, params in held.items() if "logit_bias" in params}
        assert counts == {row for row, params in held.items() if params.keys() - {"logit_bias"}}
        assert prompts == {row for row, params in held.items() if "repetition_penalty" in params}
    state.release(np.arange(12, dtype=np.int32))
    assert not any(lines_of(state, 12))


NEEDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3},  # greedy all the same
    {"top_k": 3},
    {"min_p": 0.1},
    {"logprobs": LogprobSpec()},
    {"min_new_tokens": 2, "stop_ids": (7,)},
    {"min_new_tokens": 2, "stop_ids": (7,), "generated": 1},
    {"min_new_tokens": 2, "stop_ids": (7,), "top_p": 0.5},
    {"min_new_tokens": 2, "stop_ids": (7,), "logprobs": LogprobSpec()},
    {"min_new_tokens": 2, "stop_ids": (7,), "logit_bias": {1: 2.0}},
]
RELEASE, SAMPLE = -1, -2
ROWS = st.integers(0, 5)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.tuples(st.sets(ROWS, min_size=1), st.integers(SAMPLE, len(NEEDS) - 1)), max_size=20))
def test_rows_are_plain_that_need_nothing_special(actions: list[tuple[set[int], int]]) -> None:
    state = SamplingState(6, 30, "cpu")
    everyone = np.arange(6, dtype=np.int32)
    for chosen, kind in actions:
        rows = np.array(sorted(chosen), dtype=np.int32)
        if kind == RELEASE:
            state.release(rows)
        elif kind == SAMPLE:
            sample(state, torch.zeros(len(rows), 30), rows)
        else:
            state.setup([make_setup(row, **NEEDS[kind]) for row in sorted(chosen)])
        assert [not state.plain(everyone[row : row + 1]) for row in everyone] == state.flags.special(everyone).tolist()
        assert state.plain(rows) == (not state.flags.special(rows).any())


def test_a_reused_line_forgets_its_last_row() -> None:
    state = SamplingState(4, 30, "cpu")
    rows = np.arange(4, dtype=np.int32)
    state.setup([make_setup(row, prompt=[5, 6], output=[7, 7], **KINDS[4]) for row in range(4)])
    sample(state, torch.zeros(4, 30), rows)
    state.setup([make_setup(row, prompt=[9], output=[2, 2, 40], **KINDS[4]) for row in range(4)])
    counts = state.output_counts.tensor[rows.tolist()]
    assert counts[:, 2].tolist() == [2.0] * 4
    assert float(counts.sum()) == 8.0  # the id outside the vocabulary is not counted
    assert state.prompt_tokens.tensor[rows.tolist()].nonzero()[:, 1].tolist() == [9] * 4


def test_later_rows_leave_what_others_hold() -> None:
    state = SamplingState(40, 30, "cpu")
    for row in range(40):
        state.setup([make_setup(row, logit_bias={row % 30: float(row + 1)})])
    lines = state.bias.tensor[:40]
    assert [float(lines[row, row % 30]) for row in range(40)] == [float(row + 1) for row in range(40)]
    assert lines.count_nonzero() == 40


def test_sampling_counts_tokens_and_positions() -> None:
    state = SamplingState(3, 30, "cpu")
    state.setup([make_setup(0, prompt=[1], frequency_penalty=-0.1, temperature=0.0), make_setup(2, temperature=0.0)])
    logits = torch.zeros(2, 30)
    logits[:, 11] = 5.0
    for _ in range(3):
        sample(state, logits.clone(), np.array([2, 0], dtype=np.int32))
    assert state.parameters.generated.tolist() == [3, 0, 3, 0]  # the last is the scratch row's
    assert float(state.output_counts.tensor[0, 11]) == 3.0


def test_a_penalised_row_needs_its_history() -> None:
    with pytest.raises(ValueError, match="no history"):
        SamplingState(1, 30, "cpu").setup([make_setup(0, repetition_penalty=1.1)])
