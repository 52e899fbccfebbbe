"""Decides the next step: which rows decode, which prompts go on or begin, and with which pages.

Decodes get their pages before any prompt does. `policy` orders the queue, `retraction` frees pages, `admission` decides
what memory allows, `MicroBatches` which rows of a pipeline decode, `drafting` how wide decodes are, and `assembly`
writes the plan; this module keeps their order.
"""

from dataclasses import replace

import numpy as np

from bough.core.plan import Limits, RowSetup, StepResult
from bough.core.settings import SchedulerSettings
from bough.scheduler.adapters import Adapters
from bough.scheduler.admission import Forecast, prefill_budget
from bough.scheduler.assembly import Assembly, Chunk, Decodes, PlannedStep
from bough.scheduler.drafting import Drafting
from bough.scheduler.media import Media
from bough.scheduler.policy import Ranking
from bough.scheduler.ports import Proposer
from bough.scheduler.prefix_cache import pages_for
from bough.scheduler.request import Request
from bough.scheduler.retraction import Retraction
from bough.scheduler.rows import Phase, RowIndex, RowTable
from bough.scheduler.running_batch import RunningBatch
from bough.scheduler.sharing import Sharing
from bough.scheduler.step_time import PrefillBudget
from bough.scheduler.waiting_queue import WaitingQueue

NO_ROWS: RowIndex = np.zeros(0, dtype=np.intp)
CROWDED_S = 1.0  # a request that has waited so long waits because the device is overloaded
SLOT_WAIT_S = 5.0  # a request that has waited so long for its adapter's slot lets no other adapter's go first


class MicroBatches:
    """The rows that decode in one step of a pipeline. A row decodes again once its token has come out of the last
    stage. So the rows are dealt out to as many steps as there are stages: while the last stage has one micro-batch,
    those before it have the others. `most` rows at a time; None: those behind their prompts, divided by the stages."""

    def __init__(self, table: RowTable, stages: int, most: int | None) -> None:
        self._table, self._stages, self._most = table, stages, most
        self._last = -1  # the row that was dealt last

    def next_of(self, decoding: RowIndex) -> RowIndex:
        """A micro-batch of the rows that decode, in their order: of those whose tokens are known, the next in turn."""
        table = self._table
        most = self._most or -(-np.count_nonzero(table.phase >= Phase.DECODE) // self._stages)
        ready = np.sort(decoding[table.length[decoding] < table.known[decoding]])
        turn = np.roll(ready, -int(np.searchsorted(ready, self._last, side="right")))[:most]
        if len(turn):
            self._last = int(turn[-1])
        return decoding[np.isin(decoding, turn)]


class Planner:
    def __init__(
        self,
        batch: RunningBatch,
        queue: WaitingQueue,
        settings: SchedulerSettings,
        limits: Limits,
        seed: int,
        proposer: Proposer | None = None,
        adapters: Adapters | None = None,
        media: Media | None = None,
    ) -> None:
        self._batch, self._table, self._cache, self._queue = batch, batch.table, batch.cache, queue
        self._adapters, self.media = adapters or Adapters(), media or Media(limits, 0)
        self._mixed = settings.enable_mixed_chunk
        self._whole_prompts = limits.whole_prompts
        most = prefill_budget(limits.chunk_tokens, settings.max_prefill_tokens, limits.page_size)
        gap_s = settings.stream_gap_target_ms / 1e3
        self._prefill_budget = PrefillBudget(gap_s, most, limits.page_size, limits.even_tokens)
        self._ranking = Ranking(settings, batch.cache.tree, seed)
        self._forecast = Forecast(batch, settings.schedule_conservativeness)
        self.drafting = Drafting(batch.table, limits, proposer, batch.cache.undrafted)
        self.retraction = Retraction(
            *(batch, queue, self._ranking, self._forecast),
            preemption_threshold=settings.priority_scheduling_preemption_threshold,
        )
        self.sharing = Sharing(batch, enabled=limits.shares_reads and not settings.disable_tree_attention)
        self._assembly = Assembly(batch.table)
        self._micro_batches = None
        if limits.stages > 1:
            self._micro_batches = MicroBatches(batch.table, limits.stages, settings.pp_max_micro_batch_size)
        self._setups: list[RowSetup] = []  # of the plan in the making
        self._loads = False  # prompts of it from a lower tier
        # A request that waits for memory: `moves` of the batch then, tokens cached, and pages that their lock takes.
        self._waits: tuple[Request | None, int, int, int] = (None, 0, 0, 0)
        self._token_bytes = limits.copied_bytes(0) // limits.page_size if limits.page_bytes else 0
        self.ratio = self._forecast.ratio

    def plan(self, now: float, *, drained: bool) -> PlannedStep | None:
        """The next step, or None: nothing to do, or nothing before the steps in flight are committed.

        `drained` says that none is in flight. Only then may running requests be pushed out, because their last token
        must have arrived.
        """
        self._batch.release_passed()
        self._cache.yield_pins(self._forecast.wanted(next(iter(self._queue), None)))
        if not self.retraction.ensure_pages(now, drained=drained):
            return None
        edits = self._batch.take_edits()
        self._setups, self._loads = self._batch.take_renewed(), False
        chunks: list[Chunk] = []
        if not self._mixed:
            chunks = self._prefill(now, NO_ROWS)
        decodes = self._grow_decodes(stand_back=bool(chunks))
        if self._mixed:
            chunks = self._prefill(now, decodes.rows, int(decodes.drafts.widths.sum()) - len(decodes.rows))
        if not len(decodes.rows) and not chunks:
            self._batch.put_back(edits, self._setups)
            return None
        if len(decodes.rows):
            self._table.count_samples(decodes.rows, decodes.drafts.widths)
            self.ratio.after_decode()
        chunks, common = self.sharing.arrange_chunks(chunks)
        tell = self._micro_batches is not None
        undrafted = self.drafting.leaves_out(decodes.rows, (chunk.request.row for chunk in chunks))
        step = self._assembly.assemble(self._setups, edits, decodes, chunks, common, tell=tell, undrafted=undrafted)
        if not chunks:
            return step
        begun = ((self._table.request_in(row), int(self._table.length[row])) for row in self._table.prefilling())
        return replace(step, plan=self.media.complete(step.plan, chunks, begun), loads=self._loads)

    def fits_late_arrivals(self, now: float, least: int | None) -> bool:
        """Whether the next step could hold more prompts than those that wait for it, were nothing of them cached; or,
        if `least` is given, were only so many tokens of each not cached."""
        table = self._table
        if table.free_rows <= len(self._queue):
            return False
        left = self._budget(now, table.decoding() if self._mixed else NO_ROWS)
        left -= sum(int(table.known[row] - table.length[row]) for row in table.prefilling())
        return left > sum(least or len(request.tokens) for request in self._queue)

    @property
    def figures(self) -> dict[str, object]:
        drafts = self.drafting
        return {
            "num_retractions": self.retraction.retracted,
            "new_token_ratio": self.ratio.value,
            "kv_read_bytes": self.sharing.read * self._token_bytes,
            "kv_shared_bytes": self.sharing.shared * self._token_bytes,
            "spec_verify_ct": drafts.verified,
            "spec_num_proposed_drafts": drafts.proposed,
            "spec_num_correct_drafts": drafts.held,
            # By this name SGLang's benchmark asks for it.
            **({"avg_spec_accept_length": 1 + drafts.held / max(drafts.verified, 1)} if drafts.most > 1 else {}),
            "prefill_tokens_per_s": self._prefill_budget.tokens_per_s,
            **self.media.figures,
        }

    def after_step(self, step: PlannedStep, result: StepResult) -> None:
        """Called before the step is committed."""
        self.media.after_step(result)
        self._prefill_budget.observe(step.prompt_tokens, result.device_span, loads=step.loads)
        self._cache.tokens_per_s = self._prefill_budget.likely_tokens_per_s
        plan, n = step.plan, step.decodes
        rows, alone = plan.rows[:n].astype(np.intp), not step.chunks
        self.drafting.after_step(rows, step.serials[:n], plan, result, alone=alone)

    # Decodes ----------------------------------------------------------------------------------------------------------

    def _grow_decodes(self, *, stand_back: bool) -> Decodes:
        """Pages for the next tokens of every row that decodes, or of a micro-batch; of none, when they stand back for
        prompts. There is memory for a token of each row. Where there is none for drafts, a step goes without: no
        request is retracted for the sake of a guess."""
        rows = NO_ROWS if stand_back else self._table.decoding()
        if self._micro_batches is not None:
            rows = self._micro_batches.next_of(rows)
        rows, common = self.sharing.arrange(rows)
        drafts = self.drafting.decide(rows)
        if self.drafting.most > 1 and self._batch.pages_for_decodes(rows, drafts.widths) > self._cache.growth:
            drafts = self.drafting.without(rows)
        pages, counts = self._batch.grow_decodes(rows, drafts.widths)
        self.drafting.grew(rows, drafts.widths, pages[0], counts[0])
        return Decodes(rows, drafts, pages, counts, common)

    # Prompts ----------------------------------------------------------------------------------------------------------

    def _prefill(self, now: float, beside: RowIndex, drafts: int = 0) -> list[Chunk]:
        """Prompts already begun go on first, then waiting requests begin, until the budget or the memory is used up.
        The rows `beside` them decode, with so many drafts, which are computed in the prompts' place."""
        begun = self._table.prefilling()
        if not begun and not len(self._queue):
            return []
        chunks: list[Chunk] = []
        budget = self._budget(now, beside) - drafts
        for row in begun:
            request = self._table.request_in(row)
            count = self._chunk_size(request, int(self._table.length[row]), int(self._table.known[row]), budget)
            if count > 0:
                chunks.append(self._extend(request, count))
                budget -= count + self.media.take(request, chunks[-1].first, count)
        overdue = admitted = False
        startable = budget > 0 and self._table.free_rows
        for request in self._ranking.ordered(self._queue, self._batch.moves) if startable else ():
            if budget <= 0 or not self._table.free_rows:
                break
            if request.adapter and (overdue or not self._adapters.place(request, self._table.running_requests())):
                overdue = overdue or now - request.since > SLOT_WAIT_S
                continue
            chunk = self._admit(request, budget, now, another=admitted)
            if chunk is None:
                break
            chunks.append(chunk)
            admitted = True
            budget -= self.media.take(request, chunk.first, chunk.count)
            self._loads = self._loads or self._cache.load_s > 0.0
            budget -= chunk.count + int(self._cache.load_s * (self._cache.tokens_per_s or 0.0))
        self._adapters.place_ahead(self._queue, self._table.running_requests())
        return chunks

    def _budget(self, now: float, decoding: RowIndex) -> int:
        oldest = next(iter(self._queue), None)
        return self._prefill_budget.budget(
            streaming=bool(self._table.streams[decoding].any()),
            crowded=oldest is not None and now - oldest.since > CROWDED_S,
            decodes=len(decoding),
        )

    def _admit(self, request: Request, budget: int, now: float, *, another: bool) -> Chunk | None:
        """Admits a waiting request and plans its first chunk, if its expected pages fit beside those of the others;
        `another` in the same step."""
        waits, moves, *cached = self._waits
        same = waits is request and moves == self._batch.moves and self._table.running  # the tree of the last turn
        if same and not self._forecast.fits(request, *cached):
            return None
        known, available = request.tokens[: request.match_cap], self._cache.available
        match = self._cache.match_and_lock(known, request.namespace, touch=waits is not request)
        if (allowed := self.media.boundary(request, match.length)) < match.length:
            self._cache.unlock(match)
            known = known[:allowed]
            match = self._cache.match_and_lock(known, request.namespace, touch=False)
        # With nobody else in memory the request always fits: its length was checked when it was taken.
        if not self._forecast.fits(request, match.length, another=another) and self._table.running:
            self._waits = request, self._batch.moves, match.length, available - self._cache.available
            self._cache.unlock(match)
            return None
        found = match.length
        match = self._cache.fetch(match, known, request.namespace, self._cache.tokens_per_s)
        request.branch_off(self._batch.branch(match))
        count = self._chunk_size(request, match.length, len(request.tokens), budget)
        if count <= 0:
            self._cache.unlock(match)
            return None
        self._queue.remove(request)
        request.begin_running(now)
        self._setups.append(self._batch.admit(request, match, match.length - found))
        self.drafting.begin(request.row, match.pages, first=not self._cache.tree.total_pages)
        return self._extend(request, count)

    def _chunk_size(self, request: Request, length: int, total: int, budget: int) -> int:
        """How many tokens of a prompt go into this step; whole pages, unless it is the end of the prompt.
        0: none fit, or not all where they must."""
        size, run = self._cache.page_size, self._cache.run_tokens
        room = (self._cache.growth + pages_for(length, size)) * size - length
        end = min((end for end in (request.branch, (total - 1) // run * run) if length < end < total), default=total)
        count = self.media.fit(request, length, min(end - length, room), budget)
        if length + count == total:
            return count
        return 0 if self._whole_prompts else max(0, count - (length + count) % size)

    def _extend(self, request: Request, count: int) -> Chunk:
        table, row = self._table, request.row
        first = int(table.length[row])
        pages = self._batch.grow(row, count)
        self.drafting.grew(np.array([row]), count, pages[0], len(pages[0]))
        final = first + count == int(table.known[row])
        if final:
            table.end_prompt(row)
        return Chunk(request, first, count, pages, final)
