"""Drafts change no distribution: what verified steps give, in numbers that a wrong rule would not survive.

The model is a table: the logits behind each token. Every row samples three tokens with drafts behind its own; how often
each triple comes is compared with its probability, worked out in float64 from the sampling parameters alone.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from sampling_reference import Floats, adjusted_logits, kept_tokens, make_setup, softmax

from bough.core.plan import BatchPlan, IntArray
from bough.core.sampling_params import SamplingParams
from bough.executor.verification import Draw, Drawn, draw_by_torch, sample_step
from bough.sampling.masks import BatchMasks
from bough.sampling.state import SamplingState

VOCAB, LENGTH, ROWS, WIDEST = 5, 3, 35_000, 4  # more than 10^5 tokens
FIRST = 2  # the token that all begin with
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.2
Z_P_0001 = 3.719  # of a normal distribution: one correct run of ten thousand is beyond it, and seeds are fixed
PROMPT = [FIRST, 0]

PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 3},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "logit_bias": {1: 0.7}},
    {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
]


def step_of(params: SamplingParams, said: list[int]) -> Floats:
    """The distribution of the next token."""
    logits = TABLE[[FIRST, *said][-1]].double().numpy()
    probs = softmax(adjusted_logits(logits, params, PROMPT, said) / params.temperature)
    kept = sorted(kept_tokens(probs, params.top_k, params.top_p, params.min_p))
    found = np.zeros(VOCAB)
    found[kept] = probs[kept] / probs[kept].sum()
    return found


def expected(params: SamplingParams) -> Floats:
    """By triple, in the order of their numbers."""
    return np.array(
        [
            math.prod(step_of(params, list(said[:i]))[said[i]] for i in range(LENGTH))
            for said in itertools.product(range(VOCAB), repeat=LENGTH)
        ]
    )


def guess(last: IntArray, chance: np.random.Generator) -> IntArray:
    """Drafts behind each row's last token: the likeliest, the least likely, or any."""
    kinds, drafts = chance.integers(0, 3, len(last)), [last]
    for _ in range(WIDEST - 1):
        some = TABLE.argmax(-1).numpy(), TABLE.argmin(-1).numpy(), chance.integers(0, VOCAB, VOCAB)
        drafts.append(np.stack(some)[kinds, drafts[-1]])
    return np.stack(drafts[1:], axis=1).astype(np.int32)


def grow(last: IntArray, chance: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Trees behind each row's last token: any tokens behind any nodes before them, and these nodes."""
    parents = np.stack([chance.integers(0, node, len(last)) for node in range(1, WIDEST + 2)], axis=1)
    return chance.integers(0, VOCAB, parents.shape).astype(np.int32), parents.astype(np.int32)


def sampled_triples(params: dict[str, Any], drafts: str = "", spoil: float = 0.0) -> Floats:
    """How often each came. With `spoil`, that share of drafts is kept whatever was sampled: a wrong rule."""
    state, chance = SamplingState(ROWS, VOCAB, "cpu"), np.random.default_rng(1)
    penalised = "repetition_penalty" in params
    state.setup([make_setup(row, seed=row, prompt=PROMPT if penalised else None, **params) for row in range(ROWS)])
    said = np.zeros((ROWS, LENGTH + WIDEST), dtype=np.int32)
    counts, last = np.zeros(ROWS, dtype=np.int64), np.full(ROWS, FIRST)
    while (counts < LENGTH).any():
        rows = np.flatnonzero(counts < LENGTH)
        given, parents = np.zeros((len(rows), 0), dtype=np.int32), None
        if drafts:
            given, parents = grow(last[rows], chance) if drafts == "trees" else (guess(last[rows], chance), None)
        most = 1 + given.shape[1]
        # As a scheduler cuts them. Of trees there is always a whole one, to see more of them: what is too long is cut.
        widths = np.minimum(most, np.where(drafts == "trees", most, LENGTH - counts[rows])).astype(np.int32)
        shown = np.arange(given.shape[1]) < widths[:, None] - 1
        inputs = np.concatenate([last[rows, None], given], axis=1)[
            np.concatenate([np.ones((len(rows), 1), dtype=np.bool_), shown], axis=1)
        ]
        plan = BatchPlan(
            *(0, (), (), rows.astype(np.int32), widths, widths - 1, given[shown], (), ()),
            sample=np.ones(len(rows), dtype=np.bool_),
            parents=None if parents is None else parents[shown],
        )
        draw = spoiled(state, dict(zip(rows.tolist(), given.tolist(), strict=True)), chance, spoil)
        result = sample_step(plan, TABLE[torch.from_numpy(inputs)], draw, pytest.fail)
        assert not result.bad.any()
        for column in range(result.tokens.shape[1]):
            got = (result.counts > column) & (counts[rows] + column < said.shape[1])
            said[rows[got], counts[rows[got]] + column] = result.tokens[got, column]
        counts[rows] += result.counts
        last[rows] = result.last
    weights = VOCAB ** np.arange(LENGTH)[::-1]
    return np.bincount(said[:, :LENGTH] @ weights, minlength=VOCAB**LENGTH).astype(np.float64)


def spoiled(state: SamplingState, given: dict[int, list[int]], chance: np.random.Generator, share: float) -> Draw:
    columns = dict.fromkeys(given, 0)

    def draw(logits: torch.Tensor, rows: IntArray, masks: BatchMasks | None) -> Drawn:
        drawn = draw_by_torch(state, logits.clone(), rows, masks)
        for place in np.flatnonzero(chance.random(len(rows)) < share) if share else ():
            row = int(rows[place])
            if columns[row] < len(given[row]):
                drawn.tokens[place] = given[row][columns[row]]
        for row in rows.tolist() if share else ():
            columns[row] += 1
        return drawn

    return draw


def off_by(found: Floats, probs: Floats) -> float:
    """χ² as a deviation of a normal distribution (Wilson and Hilferty); rare triples count as one."""
    wanted = probs * found.sum()
    rare = wanted < 8
    pairs = [*zip(found[~rare], wanted[~rare], strict=True)]
    if wanted[rare].sum() >= 8:
        pairs.append((found[rare].sum(), wanted[rare].sum()))
    assert not found[probs == 0].any()
    square, degrees = sum((f - w) ** 2 / w for f, w in pairs), len(pairs) - 1
    return float(((square / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees)))


@pytest.mark.parametrize(
    "params", [*PARAMS[:5], *(pytest.param(params, marks=pytest.mark.slow) for params in PARAMS[5:])]
)
@pytest.mark.parametrize("drafts", ["chains", "trees"])
def test_triples_come_as_often_as_they_should(params: dict[str, Any], drafts: str) -> None:
    assert off_by(sampled_triples(params, drafts), expected(SamplingParams(**params))) < Z_P_0001


def test_they_do_without_drafts() -> None:
    params = {"temperature": 0.8}
    assert off_by(sampled_triples(params), expected(SamplingParams(**params))) < Z_P_0001


@pytest.mark.parametrize("drafts", ["chains", "trees"])
def test_a_rule_that_keeps_a_few_drafts_too_many_is_found(drafts: str) -> None:
    params = {"temperature": 1.0}
    found = sampled_triples(params, drafts, spoil=0.05)
    assert off_by(found, expected(SamplingParams(**params))) > 2 * Z_P_0001
