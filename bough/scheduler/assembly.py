"""Puts a decided step into the form that executors read, and keeps what its commit must remember.

Decides nothing: which rows decode and which chunks go with them comes from the planner. Owns nothing but the step
counter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bough.core.plan import BatchPlan, InputLogprobs, IntArray, PageSwap, RowSetup
from bough.scheduler.request import Request
from bough.scheduler.rows import RowTable


@dataclass(frozen=True, slots=True)
class Decodes:
    """The rows that compute one more token, with the pages they got for it."""

    rows: IntArray
    pages: IntArray  # in row order
    page_counts: IntArray  # [rows]


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

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Assembly:
    """Builds plans, one after the other."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._steps = itertools.count()

    def assemble(
        self, setups: Sequence[RowSetup], edits: tuple[PageSwap, ...], decodes: Decodes, chunks: Sequence[Chunk]
    ) -> PlannedStep:
        table, n = self._table, len(decodes.rows)
        chunk_rows = np.array([c.request.row for c in chunks], dtype=np.int32)
        chunk_lens = np.array([c.count for c in chunks], dtype=np.int32)
        chunk_pages = np.array([len(c.pages) for c in chunks], dtype=np.int32)
        rows = np.concatenate([decodes.rows, chunk_rows])
        samples = [c.final and c.request.max_new > 0 for c in chunks]
        sample = np.concatenate([np.ones(n, dtype=np.bool_), np.array(samples, dtype=np.bool_)])
        masked = table.constrained[rows] & sample
        plan = BatchPlan(
            step=next(self._steps),
            setups=tuple(setups),
            edits=edits,
            rows=rows,
            query_lens=np.concatenate([np.ones(n, dtype=np.int32), chunk_lens]),
            given=np.concatenate([np.zeros(n, dtype=np.int32), chunk_lens]),
            tokens=_joined([table.tokens[c.request.row, c.first : c.first + c.count] for c in chunks]),
            new_pages=(_joined([decodes.pages, *(c.pages for c in chunks)]),),
            new_page_counts=(np.concatenate([decodes.page_counts, chunk_pages]),),
            sample=sample,
            input_logprobs=tuple(w for i, c in enumerate(chunks) if (w := self._input_logprobs(n + i, c)) is not None),
            masked=masked if masked.any() else None,
        )
        return PlannedStep(plan, table.serial[rows], tuple(chunks), n)

    def _input_logprobs(self, index: int, chunk: Chunk) -> InputLogprobs | None:
        """The part of the logprobs of given tokens that this chunk can give: position p tells of token p + 1."""
        request = chunk.request
        end = min(chunk.first + chunk.count, request.logprob_end)
        start = request.logprob_next
        if start >= end:
            return None
        request.logprob_next = end
        beyond = end == chunk.first + chunk.count
        next_token = int(self._table.tokens[request.row, end]) if beyond else -1
        return InputLogprobs(index, start - chunk.first, end - start, next_token)


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.int32), *arrays]).astype(np.int32, copy=False)
