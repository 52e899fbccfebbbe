"""Decode steps with drafts on a GPU: how many drafts hold, only the device knows, and the next step goes on from there.

Each token of such a step is a decode of its own: a row of `width` tokens stands in `width` columns, at one position
after the other, so decode kernels split its keys over the device, and a captured graph fits any lengths. What the next
step must know of a row stays on the device. The host's mirror is ahead meanwhile, as if all drafts held, and is put
right when the result is read. Steps that the host lays out itself (prompts, masks, penalties, logprobs) wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bough.attention.batch import AttentionBatch, decodes_of
from bough.core.plan import BatchPlan, IntArray, Limits, StepResult, positions_in_runs
from bough.executor.cuda_inputs import CudaInputs
from bough.executor.cuda_steps import DeviceClock, TimedStep
from bough.executor.drafter import Drafter
from bough.executor.graphs import Captured, CudaGraphs
from bough.executor.layout import Growth, has_drafts
from bough.executor.staging import Staging
from bough.kernels.drafted_decode.triton import FIELDS, count_held_, drafted_inputs_
from bough.kernels.projected_decode.triton import worth
from bough.kernels.sampling.triton import sample_rows
from bough.sampling.state import SamplingState

MOST_TOKENS = 256  # of a step with drafts, padding included: in larger ones it pays to read the keys of a row once
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # beside the largest: a column costs a draft model more than a row does
Part = Callable[[], torch.Tensor]  # of a step: up to the hidden states, or from there on
Graph = Captured[torch.Tensor]


def drafted_sizes(rows: int, drafts: int) -> dict[int, list[int]]:
    """The steps that are captured: of each width, numbers of rows."""
    widths = [width for width in WIDTHS if width <= drafts] + [1 + drafts] * bool(drafts)
    most = {width: min(rows, MOST_TOKENS // width) if width > 1 else rows for width in widths}
    return {width: sorted({1 << i for i in range(n.bit_length())} | {n}) for width, n in most.items()}


@dataclass(frozen=True, slots=True, eq=False)
class DraftedStep:
    """A step on the device; what its rows have got is in pinned memory once `done` has happened."""

    plan: BatchPlan
    done: TimedStep
    width: int
    result: torch.Tensor  # [(width + 1) * rows, or more] int64, pinned: see `count_held_`
    settle: Callable[[DraftedStep], None]

    def ready(self) -> bool:
        return self.done.ready()

    def got(self) -> tuple[IntArray, IntArray]:
        """Tokens [rows, width], -1 for bad ones, and how many hold; of a step that is done."""
        columns = self.result.numpy().reshape(self.width + 1, -1)[:, : len(self.plan.rows)].astype(np.int32)
        return columns[:-1].T, columns[-1]

    def wait(self) -> StepResult:
        span = self.done.wait()
        self.settle(self)
        tokens, counts = self.got()
        bad = tokens[np.arange(len(tokens)), counts - 1] < 0
        return StepResult(self.plan.step, np.maximum(tokens, 0), counts, bad, {}, {}, span)


class DraftedSteps:
    """Owns the buffers of these steps, and what the host does not know yet of rows. `drafts`: of a row; 0: the host
    verifies, None: there are none. All graphs write to `hidden`."""

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        limits: Limits,
        inputs: CudaInputs,
        staging: Staging,
        sampling: SamplingState,
        drafter: Drafter | None,
        drafts: int | None,
    ) -> None:
        self._forward_of, self._logits, self._hidden, self._drafter = forward, logits, hidden, drafter
        self._inputs, self._staging, self._sampling, self._limits = inputs, staging, sampling, limits
        self._drafts, tokens, rows = drafts, max(MOST_TOKENS, limits.rows) if drafts else 0, limits.rows + 1

        def zeros(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=hidden.device)

        self._of_rows = zeros(rows), zeros(rows), inputs.last_tokens  # lengths, tokens of the last step, the last token
        # Of each row a line, with room for as many drafts again that the step before may have given.
        self._lines = zeros(min(limits.rows, tokens), FIELDS + 2 * (drafts or 0))
        self._columns, self._places = zeros(2, tokens), zeros(2 + len(limits.pages), tokens, kind=torch.int64)
        self._result, self._ends = zeros(2 * tokens, kind=torch.int64), zeros(tokens, kind=torch.int64)
        self._taken = torch.zeros_like(hidden[:tokens])  # what the draft model reads of them
        self.graphs: dict[int, CudaGraphs[list[Graph]]] = {}  # by width
        self.few_keys: dict[int, CudaGraphs[list[Graph]]] = {}  # the same for steps with few keys
        self._unread: deque[DraftedStep] = deque()  # with drafts
        self._on_device = np.zeros(rows, dtype=np.bool_)  # rows whose last step was of this kind
        self._drafted = np.zeros(rows, dtype=np.bool_)  # and those whose last step had drafts
        self.ahead = False  # the step begins with more pages than its rows fill
        self.got = np.ones(rows, dtype=np.int32)  # tokens that each row got in its last step

    def begin(self, plan: BatchPlan, pooled: bool) -> BatchPlan | None:
        """None: the step is of this kind, which gives no vectors. Otherwise the host knows now what its rows have got,
        and the plan has the drafts that follow that."""
        if self._drafts is None:
            return plan
        rows, flags, drafts = plan.rows, self._sampling.flags, has_drafts(plan)
        self.ahead = bool(self._drafted[rows].any())
        if self._drafts and (drafts or self.ahead or not (self._drafter is None or plan.undrafted)):
            others = pooled or plan.masked is not None or plan.setups
            decodes = not others and bool((plan.given < plan.query_lens).all())
            tokens, spare = len(rows) * int(plan.query_lens.max()), 0 if plan.spare is None else plan.spare
            fits = tokens <= max(MOST_TOKENS, len(rows)) and int((plan.given + spare).max()) <= 2 * self._drafts
            if decodes and fits and not (flags.adjusted(rows) | flags.logprobs[rows]).any():
                return None
        self._settle()
        plan = plan.aligned(self.got[rows])
        self.got[rows], self._on_device[rows], self._drafted[rows] = 1, False, drafts
        return plan

    def _settle(self, until: DraftedStep | None = None) -> None:
        """Puts the mirror right after all steps, or those up to one."""
        while self._unread and (until is None or until in self._unread):
            step = self._unread.popleft()
            step.done.done.synchronize()
            rows, counts = step.plan.rows, step.got()[1]
            self._inputs.mirror.give_back(rows, step.plan.query_lens - counts)
            self.got[rows] = np.where(self._drafted[rows], counts, self.got[rows])

    def launch(self, plan: BatchPlan, growth: Growth, clock: DeviceClock) -> DraftedStep:
        self._inputs.write_table(growth.appended)
        rows, size, width = plan.rows, len(plan.rows), int(plan.query_lens.max())
        drafts, filtered = width > 1, bool(self._sampling.flags.filtered(rows).any())
        wide = next((each for each in self.graphs if each >= width), 0)
        few = bool(wide) and worth(size * wide, int(growth.lengths.sum()) * wide)
        found = self.few_keys[wide].find(size) if few and wide in self.few_keys else None
        found = self.graphs[wide].find(size) if found is None and wide else found
        size, width = (size, width) if found is None else (found[0], wide)
        self._send(plan, growth, size)
        if found is None:
            self._forward(size, width)
        else:
            found[1][0].replay()
        result = self._finish(size, width, filtered) if found is None or filtered else found[1][1].replay()
        pinned = self._staging.to_host(result)
        step = DraftedStep(plan, clock.stop(), width, pinned, self._settle)
        self.got[rows], self._on_device[rows], self._drafted[rows] = 1, True, drafts
        if drafts:
            self._unread.append(step)
        return step

    def _send(self, plan: BatchPlan, growth: Growth, size: int) -> None:
        n, rows = len(plan.rows), plan.rows
        lines = np.zeros((size, self._lines.shape[1]), dtype=np.int32)
        lines[n:, :2] = self._limits.rows, 1
        lines[:n, 0], lines[:n, 1] = rows, plan.query_lens
        lines[:n, 2] = np.where(self._on_device[rows], -1, growth.context_lens)
        lines[:n, 3] = np.where(self._on_device[rows], -1, self.got[rows])
        lines[:n, 4] = 0 if plan.spare is None else plan.spare
        counts = plan.given + lines[:n, 4]
        lines[np.arange(n).repeat(counts), FIELDS + positions_in_runs(counts)] = plan.tokens
        self._staging.copy_into(self._lines.view(-1)[: lines.size], lines)

    def _forward(self, size: int, width: int, few: bool = False) -> torch.Tensor:
        """From the lines to hidden states of all tokens, with what the draft model guesses and reads."""
        tokens, drafter, page_size = size * width, self._drafter, self._limits.page_size
        places, of_step = self._places[:, :tokens], (self._columns[:, :tokens], self._places[:, :tokens])
        drafted_inputs_(self._lines[:size], self._of_rows, self._inputs.all_page_tables, *of_step, page_size)
        self._inputs.shift_(places[1], self._columns[0, :tokens])
        batch, taps = self._batch(slice(tokens), few, size), None
        if drafter is not None:
            drafter.chain(places[0].view(width, size), batch.rows[:size].long(), partial(self._batch, few=few))
            taps = drafter.taps()
        hidden = self._forward_of(places[0], batch, tapped=taps)
        if drafter is not None and drafter.reads_hidden:
            self._taken[:tokens].copy_(drafter.take_in(hidden, taps, batch))
        return self._hidden[:tokens].copy_(hidden)

    def _finish(self, size: int, width: int, filtered: bool, few: bool = False) -> torch.Tensor:
        """Samples at all positions, keeps what holds, and lets the draft model follow."""
        tokens, parameters, ends = size * width, self._sampling.parameters, self._ends[:size]
        batch, logits = self._batch(slice(tokens), few, size), self._logits(self._hidden[:tokens])
        rows, result, computed = batch.rows.long(), self._result[: tokens + size], self._places[0, :tokens]
        found, bad = sample_rows(logits, rows, parameters, filtered, batch=size)
        found = self._sampling.agree(found)
        count_held_(self._lines[:size], self._of_rows, parameters.generated, computed, found, bad, result, ends)
        if self._drafter is not None and self._drafter.reads_hidden:
            self._drafter.read(rows[:size], batch, found, self._taken[:tokens], ends)
        return result

    def _batch(self, part: slice, few: bool = False, columns: int = 0) -> AttentionBatch:
        (rows, lengths), (_, positions, *slots) = self._columns[:, part], self._places[:, part]
        places = rows, lengths, positions, tuple(slots), self._inputs.page_tables, self._limits.page_size
        return decodes_of(*places, few_keys=few, columns=columns)

    def capture(self, width: int, size: int, of: Callable[[Part], Graph], few: bool = False) -> list[Graph]:
        self._lines.zero_()
        self._lines[:, 0], self._lines[:, 1] = self._limits.rows, width
        parts = partial(self._forward, size, width, few), partial(self._finish, size, width, False, few)
        for part in parts:
            part()
        torch.cuda.synchronize()
        return [of(part) for part in parts]
