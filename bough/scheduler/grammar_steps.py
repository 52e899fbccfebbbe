"""The constrained rows of a step: what they may sample, and where their grammars stand after they did.

The loop launches step t + 1, commits step t (which advances the grammars, here) and then asks for the masks of step
t + 1. A row whose mask is late, or whose token its grammar refuses, gets no token from the step: it goes back by one
and samples again. Owns no grammars: each request's is its own.
"""

import time
from collections.abc import Sequence

import numpy as np

from bough.core.finish import FinishAbort
from bough.core.plan import BoolArray, Executor, InFlight, IntArray, TokenMasks, mask_words
from bough.observability.timeline import Timeline
from bough.scheduler.assembly import PlannedStep
from bough.scheduler.jump_forward import JumpForward
from bough.scheduler.mask_work import PATIENCE_S
from bough.scheduler.rows import RowIndex
from bough.scheduler.running_batch import RunningBatch


class GrammarSteps:
    """Walks the grammars of all rows. Without `jump_forward`, forced tokens are sampled like others."""

    def __init__(
        self, batch: RunningBatch, executor: Executor, jump_forward: JumpForward | None, timeline: Timeline
    ) -> None:
        limits = executor.limits()
        self._batch, self._executor, self._timeline = batch, executor, timeline
        self._table = batch.table
        self._words, self._stages = mask_words(limits.vocab_size), limits.stages
        self._jump_forward = jump_forward
        self._supplied = -1  # the last step that got its masks

    def release(self) -> bool:
        """Lets the rows go on whose masks have come. True when others are still held."""
        table = self._table
        held = table.held.nonzero()[0].tolist()
        for row in held:
            constraint = table.request_in(row).constraint
            assert constraint is not None
            table.hold(row, constraint.awaits_mask)
        return any(table.held[row] for row in held)

    def supply(self, in_flight: Sequence[tuple[PlannedStep, InFlight]]) -> None:
        """Once no other step is in flight, all tokens before the newest are known, and so is what its rows may sample.
        In a pipeline they always are."""
        if not in_flight or (len(in_flight) > 1 and self._stages == 1):
            return
        step, _ = in_flight[-1]
        if step.plan.masked is None or step.plan.step == self._supplied:
            return
        self._supplied = step.plan.step
        with self._timeline.phase("masks", step.plan.step):
            self._executor.supply_masks(step.plan.step, self.masks(step))

    def masks(self, step: PlannedStep) -> TokenMasks:
        """For the masked rows of a step before which all their tokens are known. Rows that have ended, jumped or are
        late may sample anything: their result is dropped."""
        table = self._table
        plan = step.plan.aligned(table.known[step.plan.rows] - step.known)
        masked = plan.masked
        assert masked is not None
        if (masked & (plan.query_lens > plan.given + 1)).any():
            plan = self._executor.drafted(plan.step)
        deadline = time.monotonic() + PATIENCE_S
        places = np.flatnonzero(masked)
        decodes = plan.given < plan.query_lens
        drafts = np.where(decodes, plan.given, 0)[places]
        words = np.full((len(places) + int(drafts.sum()), self._words), -1, dtype=np.int32)
        given_ends, line = plan.given.cumsum(), 0
        for place, count in zip(places.tolist(), drafts.tolist(), strict=True):
            row, lines = int(plan.rows[place]), words[line : line + 1 + count]
            line += 1 + count
            if table.serial[row] == step.serials[place]:
                request = table.request_in(row)
                assert request.constraint is not None
                generated = int(table.known[row]) - request.prompt_len
                request.constraint.allow(lines[0], generated, deadline)
                own = slice(given_ends[place] - count, given_ends[place])
                parents = range(count) if plan.parents is None else plan.parents[own].tolist()
                request.constraint.allow_behind(plan.tokens[own].tolist(), parents, lines[1:], generated + 1)
        return TokenMasks(words)

    def advance(self, rows: RowIndex, before: IntArray, bad: BoolArray) -> dict[int, FinishAbort]:
        """Steps over the tokens behind the first `before` of each row, and over what they make inevitable. Those that a
        grammar does not take are taken back. By place in `rows`, the requests that cannot go on."""
        table = self._table
        failed: dict[int, FinishAbort] = {}
        for place in table.constrained[rows].nonzero()[0].tolist():
            request = table.request_in(int(rows[place]))
            constraint = request.constraint
            assert constraint is not None
            if bad[place]:
                if constraint.dead_end is not None:
                    failed[place] = constraint.dead_end
                continue
            first, row = int(before[place]), request.row
            sampled = table.tokens[row, first : table.known[row]].tolist()
            taken, jumped = 0, False
            while not (jumped or constraint.late) and taken < len(sampled) and constraint.accept(sampled[taken]):
                taken += 1
                table.lay(row, first, sampled[:taken])
                if self._jump_forward is not None and sampled[taken - 1] not in request.stop_ids:
                    jumped = self._jump_forward.after(request, sampled[taken - 1 :])
                    taken = int(table.known[row]) - first
            if not jumped and (constraint.late or taken < len(sampled)):  # the last one known is computed again
                known = first + taken
                table.hold(row, constraint.late)
                table.cut(row, known=known)
                self._batch.rewind(request, min(known - 1, int(table.length[row])))
        return failed
