"""How many tokens each decode computes in a step: its own and the drafts behind it.

Drafts come from the device (`Limits.drafts`) or from a proposer on the host. No row gets more than its request may
still sample, so a step never writes beyond the pages that the request was admitted with; and none under a grammar,
thinking or bad words that have no masks behind drafts, which would let through what is not allowed there.

The host proposes while the row's last step is still in flight, and does not know how many tokens that gives. So a plan
brings spare tokens, and the executor passes over as many as the row has got.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bough.core.media import MEDIA_ID
from bough.core.plan import BatchPlan, BoolArray, IntArray, Limits, StepResult
from bough.core.settings import DRAFTED_ROWS, STEP_DRAFTS
from bough.scheduler.draft_lengths import DraftLengths
from bough.scheduler.ports import Proposer
from bough.scheduler.request import Request
from bough.scheduler.rows import RowIndex, RowTable

NO_TOKENS: IntArray = np.zeros(0, dtype=np.int32)
VAIN = 0.01  # of a step's time that searches may take which find nothing


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of each decode of a step: how many tokens it computes, and those of them that the host gives."""

    widths: IntArray  # [rows]
    given: IntArray  # [rows]
    tokens: IntArray  # [sum of given and spare]
    some: bool = True  # False: all compute one token
    spare: IntArray | None = None  # [rows] None: nobody has any


class Drafting:
    def __init__(self, table: RowTable, limits: Limits, proposer: Proposer | None, lacking: BoolArray) -> None:
        self._table = table
        self._proposer = proposer
        self.most, self._model = 1 + max(limits.drafts, 0 if proposer is None else proposer.most), limits.drafts > 0
        adaptive = limits.adaptive_drafts if proposer is None else proposer.adaptive
        levels = min(1.0, limits.draft_levels / limits.drafts) if limits.draft_levels else 1.0
        self._adaptive = adaptive
        self._lengths = DraftLengths(table, STEP_DRAFTS, adaptive=adaptive, levels=levels, model=self._model)
        self.verified = self.proposed = self.held = 0  # decodes, and their drafts, since the start
        self._pause, self._longest = 0, 1  # steps before the next search, and how many there are after one in vain
        rows = len(table.requests)
        # Rows that do without the draft model until they end, and pages that lack some of what it would have computed:
        # what begins with such pages does without it, too.
        self._asleep, self._lacking = np.zeros(rows, dtype=np.bool_), lacking
        self._page_size = limits.page_size
        self._ones, self._zeros = np.ones(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)
        for shared in (self._ones, self._zeros):  # every plan without drafts has views of them
            shared.setflags(write=False)

    def without(self, rows: RowIndex) -> Drafts:
        return Drafts(self._ones[: len(rows)], self._zeros[: len(rows)], NO_TOKENS, some=False)

    def begin(self, row: int, pages: IntArray, *, first: bool = False) -> None:
        """The row has another request, which begins with these cached pages; `first`: many may begin as it does."""
        self._asleep[row] = self._model and bool(self._lacking[pages].any() or (self._lengths.resting and not first))

    def grew(self, rows: RowIndex, computed: IntArray | int, pages: IntArray, counts: IntArray | int) -> None:
        """These rows compute so many more tokens in the planned step, and have `counts` new pages each for them."""
        if not self._model:
            return
        asleep = self._asleep[rows]
        self._lacking[pages] = asleep.repeat(counts)
        if asleep.any():
            first = (self._table.length[rows] - computed)[asleep] // self._page_size
            self._lacking[self._table.pages[rows[asleep], first]] = True

    def leaves_out(self, rows: RowIndex, prompts: Iterable[int]) -> bool:
        """Whether the draft model has no part in a step of these rows."""
        return self._model and bool(self._asleep[rows].all()) and all(self._asleep[row] for row in prompts)

    def decide(self, rows: RowIndex) -> Drafts:
        if self._model and self._adaptive and len(rows) > DRAFTED_ROWS and not self._asleep[rows].all():
            return self._fall_asleep(rows)
        if self.most == 1 or not len(rows) or len(rows) > DRAFTED_ROWS or self._pause or self._asleep[rows].all():
            self._pause = max(0, self._pause - 1)
            return self.without(rows)
        if not self._lengths.knows_cost(len(rows)):  # where there are drafts for all, no other step would tell
            self._asleep[rows] = self._model  # until they end: a gap of a few tokens spoils what is guessed behind it
            return self.without(rows)
        table = self._table
        # Of an answer that may stop by itself one token is left for the next step, which is then launched: so the token
        # that it stops with is cached as it is without drafts.
        stoppable = table.heeds_eos[rows] | table.has_stop_ids[rows]
        left = table.max_new[rows] - table.sampled[rows] - stoppable
        largest = np.minimum(np.maximum(left, 1), self.most)
        for place in table.constrained[rows].nonzero()[0].tolist():
            constraint = table.request_in(int(rows[place])).constraint
            largest[place] = largest[place] if constraint is not None and constraint.quick else 1
        if self._proposer is None:
            available = np.where(self._asleep[rows], 0, largest - 1).astype(np.int32)
            guessed = self._lengths.choose(rows, available)
            free = bool((available == self.most - 1).any())  # what little an answer's end has room for tells nothing
            if (free and not guessed.any()) or self._lengths.behind(rows[~self._asleep[rows]]):
                return self._fall_asleep(rows)
            return Drafts(guessed + 1, self._zeros[: len(rows)], NO_TOKENS, some=bool(guessed.any()))
        began = time.perf_counter()
        drafts = self._propose(self._proposer, rows, largest)
        if drafts.some:
            self._longest, self._pause = max(1, self._longest // 2), 0
        else:  # searches in vain may take a small share of the time, and at most every row's
            worth = self._lengths.searches_per_step(len(rows), time.perf_counter() - began)
            self._longest = min(max(len(rows), int(1.0 / (VAIN * worth))), 2 * self._longest)
            self._pause = self._longest - 1
        return drafts

    def _fall_asleep(self, rows: RowIndex) -> Drafts:
        self._asleep[rows] = True
        self._lengths.give_up()
        return self.without(rows)

    def _propose(self, proposer: Proposer, rows: RowIndex, largest: IntArray) -> Drafts:
        """The host's drafts, behind tokens that it may not know yet."""
        table = self._table
        known = table.known[rows]
        in_flight = table.sampled[rows] - (known - table.prompt_len[rows])  # at most
        found = [
            _text(*proposer.propose(table.tokens[row, :length], table.request_in(row).namespace, ahead + most - 1))
            if most > 1
            else (NO_TOKENS, 0)
            for row, length, ahead, most in zip(*(a.tolist() for a in (rows, known, in_flight, largest)), strict=True)
        ]
        lengths, matched = np.array([(len(tokens), matched) for tokens, matched in found], dtype=np.int32).T
        given = self._lengths.choose(rows, np.maximum(lengths - in_flight, 0), matched)
        if not given.any():
            return self.without(rows)
        spare = np.where(given > 0, np.maximum(in_flight - 1, 0), 0).astype(np.int32)
        counts = (given + spare).tolist()
        tokens = [
            run[min(ahead, 1) :][:count]
            for (run, _), ahead, count in zip(found, in_flight.tolist(), counts, strict=True)
        ]
        return Drafts(given + 1, given, np.concatenate(tokens), spare=spare if spare.any() else None)

    def after_step(
        self, rows: RowIndex, serials: npt.NDArray[np.int64], plan: BatchPlan, result: StepResult, *, alone: bool
    ) -> None:
        """These rows, the plan's first, have decoded, `alone` or beside prompts. Called before the step is committed,
        which may end their requests."""
        if self.most == 1 or not len(rows):
            return
        widths, counts = plan.query_lens[: len(rows)], result.counts[: len(rows)]
        tokens = int(widths.sum())
        if alone:
            self._lengths.ran(rows, counts, tokens, result.device_span, plan.undrafted)
        live = self._table.serial[rows] == serials
        rows, proposed, held = rows[live], widths[live] - 1, np.maximum(counts[live] - 1, 0)
        if tokens > len(widths):
            self._lengths.observe(rows, proposed, held)
            self.proposed, self.held = self.proposed + int(proposed.sum()), self.held + int(held.sum())
        self.verified += len(rows)
        for row, drafts, hold in zip(rows.tolist(), proposed.tolist(), held.tolist(), strict=True):
            self._table.request_in(row).count_drafts(drafts, hold)

    def learn(self, request: Request) -> None:
        """The request has ended."""
        if self._proposer is not None:
            self._proposer.learn(request.tokens, request.namespace)


def _text(tokens: IntArray, matched: int) -> tuple[IntArray, int]:
    """Drafts up to where an image or the like stood: nobody samples that."""
    media = np.flatnonzero(tokens >= MEDIA_ID)
    return (tokens[: media[0]] if len(media) else tokens), matched
