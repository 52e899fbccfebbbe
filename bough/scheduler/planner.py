"""Puts the next step together: which rows decode, which prompts go on or begin, and with which pages.

Owns nothing but the step counter: rows and pages belong to `Residents`, waiting requests to the queue. Running streams
come first: decodes get their pages before any prompt does, and with mixed chunks they are in every step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bough.core.plan import BatchPlan, InputLogprobs, IntArray, PageSwap, RowSetup
from bough.core.settings import SchedulerSettings
from bough.memory.tree import Node
from bough.scheduler.admission import FORESIGHT_TOKENS, NewTokenRatio, reserved_pages
from bough.scheduler.policy import CACHE_AWARE, Running, Waiting, order, preemption_order, retraction_order
from bough.scheduler.prefix_cache import pages_for
from bough.scheduler.request import Request
from bough.scheduler.residents import Residents
from bough.scheduler.rows import Phase
from bough.scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one request's prompt in a plan."""

    request: Request
    first: int
    count: int
    pages: IntArray
    final: bool  # the prompt is complete after it


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan with what the commit must remember of it, by position: rows may have other owners by then."""

    plan: BatchPlan
    serials: npt.NDArray[np.int64]  # [batch] owner of each row when it was planned
    chunks: tuple[Chunk, ...]  # the last len(chunks) of the batch
    decodes: int


class Planner:
    """Decides one step at a time."""

    def __init__(
        self, residents: Residents, queue: WaitingQueue, settings: SchedulerSettings, chunk_tokens: int, seed: int
    ) -> None:
        self._residents = residents
        self._table = residents.table
        self._cache = residents.cache
        self._queue = queue
        self._mixed = settings.enable_mixed_chunk
        self._policy = "priority" if settings.enable_priority_scheduling else settings.schedule_policy
        self._urgency_sign = -1 if settings.schedule_low_priority_values_first else 1
        self._preemption_threshold = settings.priority_scheduling_preemption_threshold
        self._budget = min(chunk_tokens, settings.max_prefill_tokens)
        self._rng = random.Random(seed)
        self._step = 0
        self._setups: list[RowSetup] = []
        self.ratio = NewTokenRatio(settings.schedule_conservativeness)
        self.retracted = 0  # requests retracted since start

    def plan(self, *, drained: bool) -> PlannedStep | None:
        """The next step, or None: nothing to do, or nothing before the steps in flight are committed.

        `drained` says that none is in flight. Only then may running requests be pushed out, because their last token
        must have arrived.
        """
        if not self._make_room(drained):
            return None
        edits = self._residents.take_edits()
        self._setups = []
        chunks: list[Chunk] = []
        if not self._mixed:
            chunks = self._prefill()
        decode_rows = np.zeros(0, dtype=np.int32) if chunks else self._table.decoding()
        new_pages, new_counts = self._residents.grow_by_one(decode_rows)
        if self._mixed:
            chunks = self._prefill()
        if not len(decode_rows) and not chunks:
            return None
        return self._assemble(edits, decode_rows, new_pages, new_counts, chunks)

    # Making room ------------------------------------------------------------------------------------------------------

    def _make_room(self, drained: bool) -> bool:
        """Sees to it that every decode can have its next page. False: the steps in flight must be committed first."""
        if self._preempt_for_urgent(drained) is False:
            return False
        decoding = self._table.decoding()
        while self._residents.pages_for_one(decoding) > self._cache.available or self._starved(len(decoding)):
            if not drained:
                return False
            self._retract(retraction_order(self._running())[0])
            decoding = self._table.decoding()
        return True

    def _starved(self, decodes: int) -> bool:
        """Prompts hold all pages between them and none can go on."""
        return decodes == 0 and self._cache.available == 0 and len(self._table.prefilling()) > 1

    def _preempt_for_urgent(self, drained: bool) -> bool | None:
        """Pushes out less urgent requests when a much more urgent one could not start beside them."""
        if self._policy != "priority" or not len(self._queue):
            return None
        head = min(self._queue, key=lambda r: (-self._urgency(r), r.arrival))
        victims = preemption_order(self._running(), self._urgency(head), self._preemption_threshold)
        if not victims or self._fits(head):
            return None
        if not drained:
            return False
        for row in victims:
            self._retract(row)
            if self._fits(head):
                break
        return True

    def _fits(self, request: Request) -> bool:
        """Whether the request could start now, its cached prefix left out of account."""
        need = pages_for(len(request.tokens) + self._future(request), self._cache.page_size)
        return self._table.free_rows > 0 and need <= self._cache.available - self._reserved()

    def _running(self) -> list[Running]:
        table = self._table
        return [
            Running(r.row, int(table.known[r.row]) - r.prompt_len, r.prompt_len, self._urgency(r))
            for r in table.seated()
        ]

    def _retract(self, row: int) -> None:
        request = self._table.request_in(row)
        self._residents.leave(request)
        request.retractions += 1
        self.retracted += 1
        self._queue.add(request)
        rest = self._table.seated()
        generated = sum(int(self._table.known[r.row]) - r.prompt_len for r in rest)
        self.ratio.after_retraction(generated, sum(r.max_new for r in rest), len(rest))

    def _urgency(self, request: Request) -> int:
        return self._urgency_sign * request.priority if self._policy == "priority" else 0

    # Prompts ----------------------------------------------------------------------------------------------------------

    def _prefill(self) -> list[Chunk]:
        """Prompts already begun go on first, then waiting requests begin, until the budget or the memory is used up."""
        chunks: list[Chunk] = []
        budget = self._budget
        for row in self._table.prefilling():
            count = self._chunk_size(int(self._table.length[row]), int(self._table.known[row]), budget)
            if count > 0:
                chunks.append(self._extend(self._table.request_in(row), count))
                budget -= count
        for request in self._candidates(budget):
            if budget <= 0 or not self._table.free_rows:
                break
            chunk = self._admit(request, budget)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.count
        return chunks

    def _candidates(self, budget: int) -> list[Request]:
        if budget <= 0 or not self._table.free_rows or not len(self._queue):
            return []
        waiting = self._queue.snapshot()
        if self._policy == "fcfs" or len(waiting) == 1:
            return waiting
        return [waiting[i] for i in order(self._policy, [self._view(r) for r in waiting], self._rng)]

    def _view(self, request: Request) -> Waiting:
        tree = self._cache.tree
        prefix: int = 0
        path: tuple[int, ...] = ()
        if self._policy in CACHE_AWARE:
            key = request.tokens[: request.match_cap]
            if self._policy == "lpm":
                prefix = tree.match_length(key, request.namespace)
            else:
                path = _path_to(tree.match(key, request.namespace, touch=False).node)
        return Waiting(request.arrival, self._urgency(request), request.max_new, prefix, path)

    def _admit(self, request: Request, budget: int) -> Chunk | None:
        """Seats a waiting request and plans its first chunk, if its expected needs fit beside everyone else's."""
        match = self._cache.match_and_lock(request.tokens[: request.match_cap], request.namespace)
        length = match.length
        need = pages_for(len(request.tokens) + self._future(request), self._cache.page_size)
        need -= length // self._cache.page_size
        room = self._cache.available - self._reserved()
        count = self._chunk_size(length, len(request.tokens), budget)
        # With nobody else in memory the request always fits: its length was checked when it was taken.
        if count <= 0 or (need > room and self._table.running):
            self._cache.tree.unlock(match.node)
            return None
        self._queue.remove(request)
        self._setups.append(self._residents.admit(request, match))
        return self._extend(request, count)

    def _chunk_size(self, length: int, total: int, budget: int) -> int:
        """How many tokens of a prompt go into this step; whole pages, unless it is the end of the prompt."""
        size = self._cache.page_size
        room = (self._cache.available + pages_for(length, size)) * size - length
        count = min(budget, total - length, room)
        return count if length + count == total else max(0, count - (length + count) % size)

    def _extend(self, request: Request, count: int) -> Chunk:
        table, row = self._table, request.row
        first = int(table.length[row])
        pages = self._residents.grow(row, count)
        final = first + count == int(table.known[row])
        if final:
            samples = request.max_new > int(table.sampled[row])
            table.sampled[row] += samples
            table.phase[row] = Phase.DECODE if int(table.sampled[row]) < request.max_new else Phase.DRAINING
        return Chunk(request, first, count, pages, final)

    def _future(self, request: Request) -> int:
        return min(request.max_new - request.generated, FORESIGHT_TOKENS)

    def _reserved(self) -> int:
        table = self._table
        rows = np.flatnonzero(table.phase != Phase.FREE)
        return reserved_pages(
            np.maximum(table.known[rows] - table.length[rows], 0),
            table.max_new[rows] - table.sampled[rows],
            table.page_count[rows] * table.page_size - table.length[rows],
            self.ratio.value,
            table.page_size,
        )

    # The plan ---------------------------------------------------------------------------------------------------------

    def _assemble(
        self,
        edits: tuple[PageSwap, ...],
        decode_rows: IntArray,
        decode_pages: IntArray,
        decode_counts: IntArray,
        chunks: Sequence[Chunk],
    ) -> PlannedStep:
        table, n = self._table, len(decode_rows)
        if n:
            table.sampled[decode_rows] += 1
            table.phase[decode_rows[table.sampled[decode_rows] >= table.max_new[decode_rows]]] = Phase.DRAINING
            self.ratio.after_decode()
        chunk_rows = np.array([c.request.row for c in chunks], dtype=np.int32)
        chunk_lens = np.array([c.count for c in chunks], dtype=np.int32)
        rows = np.concatenate([decode_rows, chunk_rows])
        samples = [c.final and c.request.max_new > 0 for c in chunks]
        plan = BatchPlan(
            step=self._step,
            setups=tuple(self._setups),
            edits=edits,
            rows=rows,
            query_lens=np.concatenate([np.ones(n, dtype=np.int32), chunk_lens]),
            given=np.concatenate([np.zeros(n, dtype=np.int32), chunk_lens]),
            tokens=_joined([table.tokens[c.request.row, c.first : c.first + c.count] for c in chunks]),
            new_pages=(_joined([decode_pages, *(c.pages for c in chunks)]),),
            new_page_counts=(
                np.concatenate([decode_counts, np.array([len(c.pages) for c in chunks], dtype=np.int32)]),
            ),
            sample=np.concatenate([np.ones(n, dtype=np.bool_), np.array(samples, dtype=np.bool_)]),
            input_logprobs=tuple(w for i, c in enumerate(chunks) if (w := self._input_logprobs(n + i, c)) is not None),
        )
        self._step += 1
        return PlannedStep(plan, table.serial[rows], tuple(chunks), n)

    def _input_logprobs(self, index: int, chunk: Chunk) -> InputLogprobs | None:
        """The part of the prompt logprobs that this chunk can give: position p tells of token p + 1."""
        request = chunk.request
        end = min(chunk.first + chunk.count, request.prompt_len - 1)
        start = request.logprob_next
        if start >= end:
            return None
        request.logprob_next = end
        beyond = end == chunk.first + chunk.count
        next_token = int(self._table.tokens[request.row, end]) if beyond else -1
        return InputLogprobs(index, start - chunk.first, end - start, next_token)


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.int32), *arrays]).astype(np.int32, copy=False)


def _path_to(node: Node | None) -> tuple[int, ...]:
    """Names of the nodes from the root's child down to `node`."""
    path: list[int] = []
    while node is not None and node.parent is not None:
        path.append(id(node))
        node = node.parent
    return tuple(reversed(path))
