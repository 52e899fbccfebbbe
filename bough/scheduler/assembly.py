"""Puts a decided step into the form that executors read, and keeps what its commit must remember.

Decides nothing: which rows decode and which chunks go with them comes from the planner. Owns nothing but the step
counter.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bough.core.plan import BatchPlan, InputLogprobs, IntArray, PageSwap, RowSetup
from bough.scheduler.drafting import Drafts
from bough.scheduler.request import Request
from bough.scheduler.rows import RowIndex, RowTable


@dataclass(frozen=True, slots=True)
class Decodes:
    """The rows that go on behind their last sampled token, with the pages they got for that."""

    rows: RowIndex
    drafts: Drafts
    pages: tuple[IntArray, ...]  # of each group, in row order
    page_counts: tuple[IntArray, ...]  # [rows]
    common: IntArray | None = None  # [rows] first tokens that each shares with the row before it


@dataclass(frozen=True, slots=True)
class Chunk:
    request: Request
    first: int
    count: int
    pages: tuple[IntArray, ...]  # of each group
    final: bool  # the prompt is complete after it


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan with what the commit must remember of it, by position: rows may have other owners by then."""

    plan: BatchPlan
    serials: npt.NDArray[np.int64]  # [batch] owner of each row when it was planned
    chunks: tuple[Chunk, ...]  # the last len(chunks) of the batch
    decodes: int
    has_drafts: bool
    known: IntArray  # [batch] tokens of each row whose value the host knew when it was planned
    loads: bool = False  # it may wait for pages on their way

    @property
    def prompt_tokens(self) -> int:
        """Those that encoders compute count as well."""
        return sum(chunk.count for chunk in self.chunks) + sum(item.rows for item in self.plan.encodes)

    @property
    def category(self) -> str:
        """What SGLang calls a step that does this."""
        return "decode" if not self.chunks else "mixed" if self.decodes else "extend"


class Assembly:
    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._steps = itertools.count()
        self._trues = np.ones(len(table.requests), dtype=np.bool_)  # every plan has a view of it: all decodes sample
        self._trues.setflags(write=False)

    def assemble(
        self,
        setups: Sequence[RowSetup],
        edits: tuple[PageSwap, ...],
        decodes: Decodes,
        chunks: Sequence[Chunk],
        common: IntArray | None = None,
        *,
        tell: bool = False,
        undrafted: bool = False,
    ) -> PlannedStep:
        """`common` is that of the chunks. `tell` has the plan say with which tokens decodes begin; the host must know
        them."""
        table, n = self._table, len(decodes.rows)
        plan = BatchPlan(
            step=next(self._steps),
            setups=tuple(setups),
            edits=edits,
            rows=decodes.rows.astype(np.int32),
            query_lens=decodes.drafts.widths,
            given=decodes.drafts.given,
            tokens=decodes.drafts.tokens,
            new_pages=decodes.pages,
            new_page_counts=decodes.page_counts,
            sample=self._trues[:n],
            spare=decodes.drafts.spare,
            common=decodes.common,
            last_tokens=table.tokens[decodes.rows, table.known[decodes.rows] - 1] if tell else None,
            undrafted=undrafted,
        )
        if chunks:
            plan = self._with_chunks(plan, chunks, common)
        rows = plan.rows.astype(np.intp)
        masked = table.constrained[rows] & plan.sample
        if masked.any():
            plan = replace(plan, masked=masked)
        return PlannedStep(plan, table.serial[rows], tuple(chunks), n, decodes.drafts.some, table.known[rows])

    def _with_chunks(self, decodes: BatchPlan, chunks: Sequence[Chunk], common: IntArray | None) -> BatchPlan:
        if common is not None or decodes.common is not None:
            parts = ((decodes.common, decodes.rows), (common, chunks))
            common = np.concatenate([np.zeros(len(of), np.int32) if own is None else own for own, of in parts])
        n, tokens = len(decodes.rows), self._table.tokens
        lens, last = [c.count for c in chunks], tokens.shape[1] - 1
        return replace(
            decodes,
            rows=_joined(decodes.rows, [c.request.row for c in chunks]),
            query_lens=_joined(decodes.query_lens, lens),
            spare=None if decodes.spare is None else _joined(decodes.spare, [0] * len(chunks)),
            given=_joined(decodes.given, lens),
            tokens=np.concatenate(
                [decodes.tokens, *(tokens[c.request.row, c.first : c.first + c.count] for c in chunks)]
            ),
            new_pages=tuple(
                np.concatenate([pages, *(c.pages[group] for c in chunks)])
                for group, pages in enumerate(decodes.new_pages)
            ),
            new_page_counts=tuple(
                _joined(counts, [len(c.pages[group]) for c in chunks])
                for group, counts in enumerate(decodes.new_page_counts)
            ),
            common=common,
            sample=np.concatenate([decodes.sample, [c.final and c.request.max_new > 0 for c in chunks]]),
            next_tokens=np.array([tokens[c.request.row, min(c.first + c.count, last)] for c in chunks], dtype=np.int32),
            input_logprobs=tuple(w for i, c in enumerate(chunks) if (w := self._input_logprobs(n + i, c)) is not None),
        )

    def _input_logprobs(self, index: int, chunk: Chunk) -> InputLogprobs | None:
        """The part of the logprobs of given tokens that this chunk can give: position p tells of token p + 1."""
        request = chunk.request
        end = min(chunk.first + chunk.count, request.logprob_end)
        start = request.logprob_next
        if start >= end:
            return None
        request.plan_scores(end)
        beyond = end == chunk.first + chunk.count
        next_token = int(self._table.tokens[request.row, end]) if beyond else -1
        return InputLogprobs(index, start - chunk.first, end - start, next_token)


def _joined(of_decodes: IntArray, of_chunks: Sequence[int]) -> IntArray:
    return np.concatenate([of_decodes, np.array(of_chunks, dtype=np.int32)])
