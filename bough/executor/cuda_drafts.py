"""Decode steps with drafts on a GPU: how many drafts hold, only the device knows, and the next step goes on from there.

Each token of such a step is a decode of its own: a row of `width` tokens stands in `width` columns, at one position
after the other, so decode kernels read its keys, split over the device, and a captured graph fits any lengths. What the
next step must know of a row, its length, its last token and how many tokens it got, stays on the device. The host's
mirror is ahead meanwhile, as if all drafts held, and is put right when the result is read. Steps that the host lays out
itself (prompts, masks, penalties, logprobs) wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch
from bough.attention.context import ForwardContext
from bough.core.plan import BatchPlan, IntArray, Limits, StepResult, positions_in_runs
from bough.executor.cuda_inputs import CudaInputs
from bough.executor.cuda_steps import DeviceClock, TimedStep
from bough.executor.drafter import Drafter
from bough.executor.graphs import Captured, CudaGraphs, Pauses
from bough.executor.layout import Growth
from bough.executor.staging import Staging
from bough.kernels.drafted_decode.triton import FIELDS, count_held_, drafted_inputs_
from bough.kernels.sampling.triton import sample_rows
from bough.memory.pools.kv_pool import KVPool
from bough.models.base import CausalLM
from bough.sampling.state import SamplingState

MOST_TOKENS = 256  # of a step, padding included: in larger ones it pays to read the keys of a row once
Capture = Callable[[Callable[[], torch.Tensor]], Captured[torch.Tensor]]


def drafted_sizes(rows: int, drafts: int, *, exact: bool) -> dict[int, list[int]]:
    """The steps that are captured: of each width, numbers of rows. Columns cost a draft model time, so its widths are
    `exact` where they are few; a draft that was given is just another token."""
    widths = {1, 1 + drafts, *(1 << power for power in range(1, drafts.bit_length()))}
    if exact:
        widths |= set(range(1, min(drafts, 8) + 1))
    most = {width: min(rows, MOST_TOKENS // width) for width in sorted(widths)}
    return {width: sorted({1 << i for i in range(n.bit_length())} | {n}) for width, n in most.items()}


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step on the device; what its rows have got is in pinned memory once `done` has happened."""

    plan: BatchPlan
    done: TimedStep
    number: int
    width: int
    result: torch.Tensor  # [(width + 1) * rows, or more] int64, pinned: see `count_held_`
    settle: Callable[[int], None]

    def ready(self) -> bool:
        return self.done.ready()

    def got(self) -> tuple[IntArray, IntArray]:
        """Tokens [rows, width], -1 for bad ones, and how many hold; of a step that is done."""
        columns = self.result.numpy().reshape(self.width + 1, -1)[:, : len(self.plan.rows)].astype(np.int32)
        return columns[:-1].T, columns[-1]

    def wait(self) -> StepResult:
        span = self.done.wait()
        self.settle(self.number)
        tokens, counts = self.got()
        bad = tokens[np.arange(len(tokens)), counts - 1] < 0
        return StepResult(self.plan.step, np.maximum(tokens, 0), counts, bad, {}, {}, span)


class DraftedSteps:
    """Owns the buffers of these steps, and what the host does not know yet of rows."""

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        attention: AttentionBackend,
        limits: Limits,
        inputs: CudaInputs,
        staging: Staging,
        sampling: SamplingState,
        drafter: Drafter | None,
        *,
        drafts: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._pool, self._attention, self._drafter = model, pool, attention, drafter
        self._inputs, self._staging, self._sampling, self._limits = inputs, staging, sampling, limits
        rows, device, tokens = limits.rows + 1, inputs.last_tokens.device, MOST_TOKENS if drafts else 0
        self._drafts = drafts  # of a row; 0: there are no such steps

        def zeros(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self._lengths, self._counts = zeros(rows), zeros(rows)
        # Of each row its line, with room for as many drafts again that the step before may have given.
        self._lines = zeros(min(limits.rows, tokens), FIELDS + 2 * drafts)
        self._columns = zeros(2, tokens)
        self._places = zeros(2 + len(limits.pages), tokens, kind=torch.int64)
        self._result = zeros(2 * tokens, kind=torch.int64)
        self._ends = zeros(tokens, kind=torch.int64)
        self._hidden = zeros(tokens, hidden_size, kind=dtype)
        self._taken = self._hidden  # what the draft model reads of them
        if drafter is not None and drafter.reads_hidden:
            self._taken = zeros(tokens, drafter.hidden_size, kind=dtype)
        self._graphs: dict[int, CudaGraphs[Any]] = {}
        self._unread: deque[DraftedStep] = deque()  # with drafts
        self._number = 0  # of the last step, of any kind
        self._begun = np.zeros(rows, dtype=np.int64)  # the steps in which rows were set up
        self._last = np.zeros(rows, dtype=np.int64)  # and in which they were last
        self._on_device = np.zeros(rows, dtype=np.bool_)  # rows whose last step was of this kind
        self._drafted = np.zeros(rows, dtype=np.bool_)  # and had drafts
        self._got = np.ones(rows, dtype=np.int32)  # tokens that each row got in its last step

    def make_graphs(
        self, sizes: Mapping[int, Sequence[int]], pauses: Pauses, capture: Capture
    ) -> list[CudaGraphs[Any]]:
        for width, of_width in sizes.items():
            make = partial(self._capture, width, capture=capture)
            self._graphs[width] = CudaGraphs(f"{width}-token decode", of_width, make, pauses)
        return list(self._graphs.values())

    # What the host knows ----------------------------------------------------------------------------------------------

    def begin(self, plan: BatchPlan) -> BatchPlan | None:
        """Counts a step, whose rows have been set up. None: it is of this kind. Otherwise the host knows all that came
        before, and the plan has the drafts that follow it."""
        rows, flags = plan.rows, self._sampling.flags
        if not self._drafts:
            plan = plan.aligned(self._got[rows])
            self._got[rows] = 1
            return plan
        self._number += 1
        for setup in plan.setups:
            self._begun[setup.row], self._on_device[setup.row], self._drafted[setup.row] = self._number, False, False
        drafts = bool((plan.query_lens > 1).any())
        own = (
            (self._drafter is not None or drafts or bool(self._drafted[rows].any()))
            and bool((plan.given < plan.query_lens).all())
            and plan.masked is None
            and len(rows) * int(plan.query_lens.max()) <= MOST_TOKENS
            and (plan.spare is None or int((plan.given + plan.spare).max()) <= 2 * self._drafts)
            and not (flags.adjusted(rows) | flags.logprobs[rows]).any()
        )
        if own:
            return None
        self.settle(self._number)
        plan = plan.aligned(self._got[rows])
        self._last[rows], self._got[rows], self._on_device[rows], self._drafted[rows] = self._number, 1, False, False
        return plan

    def got(self, rows: IntArray, counts: IntArray) -> None:
        """So many tokens each, in a step that the host has verified."""
        self._got[rows] = counts

    def settle(self, until: int) -> None:
        """Puts the mirror right after steps up to this number."""
        while self._unread and self._unread[0].number <= until:
            step = self._unread.popleft()
            step.done.done.synchronize()
            rows, counts = step.plan.rows, step.got()[1]
            same = self._begun[rows] <= step.number
            self._inputs.give_back(rows[same], (step.plan.query_lens - counts)[same])
            newest = self._last[rows] == step.number
            self._got[rows[newest]] = counts[newest]

    # Steps ------------------------------------------------------------------------------------------------------------

    def launch(self, plan: BatchPlan, growth: Growth, clock: DeviceClock) -> DraftedStep:
        self._inputs.write_table(growth.appended)
        size, width, graph = len(plan.rows), int(plan.query_lens.max()), None
        filtered = bool(self._sampling.flags.filtered(plan.rows).any())
        wide = next((each for each in self._graphs if each >= width), width)
        found = self._graphs[wide].find(size) if wide in self._graphs else None
        if found is not None:
            (size, graph), width = found, wide
        self._send(plan, growth, size)
        if graph is None:
            self._forward(size, width)
        else:
            graph[0].replay()
        result = self._finish(size, width, filtered) if graph is None or filtered else graph[1].replay()
        pinned = self._staging.to_host(result)
        step = DraftedStep(plan, clock.stop(), self._number, width, pinned, self.settle)
        rows, drafts = plan.rows, bool((plan.query_lens > 1).any())
        self._last[rows], self._got[rows], self._on_device[rows], self._drafted[rows] = self._number, 1, True, drafts
        if drafts:
            self._unread.append(step)
        return step

    def _send(self, plan: BatchPlan, growth: Growth, size: int) -> None:
        n, rows = len(plan.rows), plan.rows
        lines = np.zeros((size, self._lines.shape[1]), dtype=np.int32)
        lines[:, :4] = self._limits.rows, 1, 0, 1
        known = ~self._on_device[rows]
        lines[:n, 0], lines[:n, 1] = rows, plan.query_lens
        lines[:n, 2] = np.where(known, growth.context_lens, -1)
        lines[:n, 3] = np.where(known, self._got[rows], -1)
        counts = plan.given
        if plan.spare is not None:
            lines[:n, 4], counts = plan.spare, counts + plan.spare
        lines[np.arange(n).repeat(counts), FIELDS + positions_in_runs(counts)] = plan.tokens
        self._staging.copy_into(self._lines.view(-1)[: lines.size], lines)

    def _forward(self, size: int, width: int) -> torch.Tensor:
        """From the lines to hidden states of all tokens, with what the draft model guesses and reads."""
        tokens, drafter = size * width, self._drafter
        own, device = self._inputs, (self._lengths, self._counts, self._inputs.last_tokens)
        into = self._columns[:, :tokens], self._places[:, :tokens]
        drafted_inputs_(self._lines[:size], *device, own.all_page_tables, *into, self._limits.page_size)
        ids, batch, taps = self._places[0, :tokens], self._batch(slice(tokens)), None
        if drafter is not None:
            drafter.chain(ids.view(width, size), batch.rows[:size].long(), self._batch)
            taps = drafter.taps()
        self._attention.prepare(batch)
        hidden = self._model.forward(
            ids, batch.positions, ForwardContext(self._attention, self._pool, batch, tapped=taps)
        )
        if drafter is not None and drafter.reads_hidden:
            self._taken[:tokens].copy_(drafter.take_in(hidden, taps, batch))
        return self._hidden[:tokens].copy_(hidden)

    def _finish(self, size: int, width: int, filtered: bool) -> torch.Tensor:
        """Samples at all positions, keeps what holds, and lets the draft model follow."""
        tokens, batch = size * width, self._batch(slice(size * width))
        state, rows, ends = self._sampling, batch.rows.long(), self._ends[:size]
        found, bad = sample_rows(
            self._model.logits(self._hidden[:tokens]), rows, state.parameters, filtered, batch=size
        )
        found = state.agree(found)
        result, device = self._result[: tokens + size], (self._lengths, self._counts, self._inputs.last_tokens)
        of_rows = self._lines[:size], *device, state.parameters.generated
        count_held_(*of_rows, self._places[0, :tokens], found, bad, result, ends)
        if self._drafter is not None:
            self._drafter.follow_on_device(rows[:size], batch, found, self._taken[:tokens], ends)
        return result

    def _batch(self, part: slice) -> AttentionBatch:
        """Some of the tokens, each as a decode."""
        rows, lengths = self._columns[:, part]
        _, positions, *slots = self._places[:, part]
        ones = np.ones(len(rows), dtype=np.int32)
        return AttentionBatch(
            rows=rows,
            lengths=lengths,
            decodes=len(rows),
            query_lens=ones,
            query_starts=np.arange(len(rows) + 1, dtype=np.int32),
            context_lens=ones,  # the kernels take `lengths`
            page_tables=self._inputs.page_tables,
            slots=tuple(slots),
            positions=positions,
            page_size=self._limits.page_size,
        )

    def _capture(self, width: int, size: int, *, capture: Capture) -> tuple[Captured[torch.Tensor], ...]:
        self._lines.zero_()
        self._lines[:, 0], self._lines[:, 1] = self._limits.rows, width
        parts = partial(self._forward, size, width), partial(self._finish, size, width, False)
        for part in parts:
            part()
        torch.cuda.synchronize()
        return tuple(capture(part) for part in parts)
