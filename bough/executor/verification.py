"""Rows of executors on a CPU, and what a step returns that the host waits for: sampled tokens, with drafts verified.

A draft holds where the model samples the same token. Positions are sampled column by column: first the token behind
each row's own; then, of the rows with that token among their drafts there, the one behind this draft; and so on. The
sampling state counts on from column to column, so seeds, penalties and min_new_tokens are those of decodes without
drafts, and so are the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bough.attention.reading import ToDevice
from bough.core.plan import (
    BatchPlan,
    BoolArray,
    FloatArray,
    IntArray,
    Limits,
    LogprobSpec,
    PositionLogprobs,
    StepResult,
    TokenMasks,
)
from bough.executor.layout import LongArray, RowMirror, StepLayout, has_drafts, prompt_targets
from bough.sampling.logprobs import PendingLogprobs, Scores, output_logprobs, score_inputs
from bough.sampling.masks import BatchMasks
from bough.sampling.sampler import sample
from bough.sampling.state import Agree, SamplingState, as_drawn


class Drawn(NamedTuple):
    """A step's tokens."""

    tokens: LongArray  # [n] 0 where bad
    bad: BoolArray  # [n] the logits held NaN or +inf, or no token was possible


Specs = Sequence[LogprobSpec | None]  # of each row; None: it wants no logprobs
ByPlace = dict[int, PositionLogprobs]  # in the plan
Inputs = dict[int, Scores]  # the same
Vectors = dict[int, FloatArray]  # the same
Draw = Callable[[Tensor, IntArray, BatchMasks | None], Drawn]  # samples for rows from the first lines of logits


@torch.inference_mode()
def draw_by_torch(state: SamplingState, logits: Tensor, rows: IntArray, masks: BatchMasks | None) -> Drawn:
    sampled = sample(state, logits, rows, masks)
    return Drawn(sampled.tokens.numpy(), sampled.bad.numpy())


class HostRows:
    """Owns what an executor on a CPU knows of each row: `apply` takes a plan in, `finish` samples and moves rows on."""

    def __init__(self, limits: Limits, agree: Agree = as_drawn) -> None:
        self.mirror = RowMirror(limits)
        self.last_tokens = np.zeros(limits.rows, dtype=np.int64)
        self._counts = np.ones(limits.rows, dtype=np.int32)  # tokens that each row got in its last step
        self.sampling = SamplingState(limits.rows, limits.vocab_size, "cpu", agree)
        self._samples = limits.vectors is None

    def align(self, plan: BatchPlan) -> BatchPlan:
        """The plan with the drafts that follow what its rows have got."""
        return plan.aligned(self._counts[plan.rows])

    def apply(self, plan: BatchPlan) -> StepLayout:
        """Brings the rows up to date; decodes begin with the token that their row sampled last."""
        if self._samples:
            self.sampling.setup(plan.setups)
        layout, decoding = self.mirror.apply(plan), plan.rows[plan.given < plan.query_lens]
        last = plan.last_tokens
        layout.token_ids[layout.from_device] = self.last_tokens[decoding] if last is None else last
        return layout

    def finish(self, plan: BatchPlan, logits: Tensor, draw: Draw, masks: Callable[[], TokenMasks]) -> Verified:
        """Samples from logits that stand as `sampled_tokens` orders them."""
        sampled, rows = sample_step(plan, logits, draw, masks), plan.rows[plan.sample]
        self.last_tokens[rows], self._counts[rows] = sampled.last, sampled.counts
        self.mirror.give_back(rows, sampled.widths - sampled.counts)
        return sampled


@dataclass(frozen=True, slots=True)
class Verified:
    """What the rows that sample have got."""

    tokens: LongArray  # [n, width]
    counts: IntArray  # [n] how many of them hold: at least 1
    bad: BoolArray  # [n]
    lines: LongArray  # [n] where the logits of each row begin
    widths: IntArray  # [n] how many it has
    path: LongArray  # [n, width] and by which of them each token was sampled

    @property
    def last(self) -> LongArray:
        taken: LongArray = self.tokens[np.arange(len(self.tokens)), self.counts - 1]
        return taken

    def result(
        self, plan: BatchPlan, logits: Tensor, state: SamplingState, inputs: Inputs, vectors: Vectors | None = None
    ) -> StepResult:
        """With the vectors of rows, of trees too."""
        specs, vectors = state.specs(plan.rows[plan.sample]), vectors or {}
        if plan.parents is not None:
            trees = int((plan.given < plan.query_lens).sum())
            vectors = {i: of[self.path[i, : len(of)]] if i < trees else of for i, of in vectors.items()}
        pending = None if specs is None else self._score(logits, specs)
        if logits.is_cuda and (pending or inputs):
            torch.cuda.current_stream(logits.device).synchronize()  # the copies that are read here are only queued
        outputs = {} if pending is None else self._by_place(plan, pending.read())
        tokens, scored = self.tokens.astype(np.int32), {index: scores.to_host() for index, scores in inputs.items()}
        return StepResult(plan.step, tokens, self.counts, self.bad, outputs, scored, vectors=vectors)

    @torch.inference_mode()
    def _score(self, logits: Tensor, specs: Specs) -> PendingLogprobs:
        """Of each row that wants logprobs, all tokens that it has got."""
        held = np.arange(self.tokens.shape[1]) < self.counts[:, None]
        lines = torch.from_numpy((self.lines[:, None] + self.path)[held]).to(logits.device)
        tokens = torch.from_numpy(self.tokens[held]).to(logits.device)
        asked = [spec for spec, count in zip(specs, self.counts.tolist(), strict=True) for _ in range(count)]
        scored = logits[lines] if self.tokens.shape[1] > 1 else logits[: len(lines)]
        return output_logprobs(scored, tokens, asked)

    def _by_place(self, plan: BatchPlan, runs: Sequence[PositionLogprobs | None]) -> ByPlace:
        found: ByPlace = {}
        places, ends = np.flatnonzero(plan.sample).tolist(), self.counts.cumsum().tolist()
        for place, count, end in zip(places, self.counts.tolist(), ends, strict=True):
            of_row = [run for run in runs[end - count : end] if run is not None]
            if of_row:
                found[place] = PositionLogprobs.joined(of_row)
        return found


_NONE, _NO_LINES = np.zeros(0, dtype=np.int32), np.zeros((0, 1), dtype=np.int64)
NOTHING = Verified(_NO_LINES, _NONE, _NONE.astype(np.bool_), _NO_LINES[:, 0], _NONE, _NO_LINES)


def sample_step(plan: BatchPlan, logits: Tensor, draw: Draw, masks: Callable[[], TokenMasks]) -> Verified:
    """Samples for all rows of the plan that do."""
    rows = plan.rows[plan.sample]
    if not len(rows):
        return NOTHING
    of_batch = BatchMasks.on_host(plan, masks)
    if has_drafts(plan):
        return _verify(plan, logits, draw, of_batch)
    tokens, bad = draw(logits, rows, of_batch)
    ones, tokens = np.ones(len(rows), dtype=np.int32), tokens.reshape(-1, 1)
    return Verified(tokens, ones, bad, np.arange(len(rows)), ones, np.zeros_like(tokens))


@torch.inference_mode()
def prompt_logprobs(
    plan: BatchPlan,
    state: SamplingState,
    hidden: Tensor,  # of all tokens
    query_starts: IntArray,
    logits_at: Callable[[slice], Callable[[Tensor], Tensor]],  # for some tokens: what makes logits of their states
    to_device: ToDevice = torch.from_numpy,
) -> Inputs:
    """The logprobs of prompt tokens that the plan asks for, by place in the plan."""
    found = {}
    for want in plan.input_logprobs:
        first = int(query_starts[want.index]) + want.first
        at, targets = slice(first, first + want.count), to_device(prompt_targets(plan, want))
        spec = state.logprob_specs[int(plan.rows[want.index])] or LogprobSpec()
        found[want.index] = score_inputs(logits_at(at), hidden[at], targets, spec)
    return found


def _verify(plan: BatchPlan, logits: Tensor, draw: Draw, masks: BatchMasks | None) -> Verified:
    widths, rows = plan.sample_widths, plan.rows[plan.sample]
    lines = (widths.cumsum() - widths).astype(np.int64)
    given_at = (plan.given.cumsum() - plan.given)[plan.sample]
    masked = np.zeros(len(rows), dtype=np.bool_) if masks is None else masks.masked
    mask_at = (np.where(masked, widths, 0).cumsum() - widths).astype(np.int64)
    tokens = np.zeros((len(rows), int(widths.max())), dtype=np.int64)
    counts, bad = np.zeros(len(rows), dtype=np.int32), np.zeros(len(rows), dtype=np.bool_)
    columns = np.arange(tokens.shape[1])
    given = given_at[:, None] + columns - 1  # where the drafts are, behind each row's own token
    is_draft = (columns > 0) & (columns < widths[:, None])
    drafts, parents = np.full_like(tokens, -1), np.broadcast_to(columns - 1, tokens.shape)
    drafts[is_draft] = plan.tokens[given[is_draft]]
    if plan.parents is not None:
        parents = np.zeros_like(tokens)
        parents[is_draft] = plan.parents[given[is_draft]]
    left, path = np.arange(len(rows)), np.zeros_like(tokens)
    for column in columns.tolist():
        at = path[left, column]
        of_column = logits.index_select(0, torch.from_numpy(lines[left] + at).to(logits.device))
        tokens[left, column], bad[left] = draw(of_column, rows[left], _column(masks, masked[left], mask_at[left] + at))
        counts[left] = column + 1
        holds = (drafts[left] == tokens[left, column, None]) & (parents[left] == at[:, None]) & ~bad[left, None]
        left, holds = left[holds.any(1)], holds[holds.any(1)]
        if not len(left):
            break
        path[left, column + 1] = holds.argmax(1)
    return Verified(tokens, counts, bad, lines, widths, path)


def _column(masks: BatchMasks | None, masked: BoolArray, lines: LongArray) -> BatchMasks | None:
    """The masks of one position of some rows."""
    if masks is None or not masked.any():
        return None
    words = masks.words.index_select(0, torch.from_numpy(lines[masked]))
    return BatchMasks(masked, torch.from_numpy(np.flatnonzero(masked)), words)
