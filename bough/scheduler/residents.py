"""Who lives in which row on which pages: admission of a request into memory, its growth, and its leaving.

Owns the row table and the moves between it and the prefix cache. A chunk enters the tree as soon as it is planned:
plans run in order and every layer stores before it attends, so whoever matches it reads it after it was written, even
in the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bough.core.plan import IntArray, PageSwap, RowSetup, ranks
from bough.memory.tree import Match, Node
from bough.scheduler.prefix_cache import NO_PAGES, PrefixCache, pages_for
from bough.scheduler.request import Request
from bough.scheduler.rows import Phase, RowIndex, RowTable


class Residents:
    """The running requests and their memory."""

    def __init__(self, table: RowTable, cache: PrefixCache) -> None:
        self.table = table
        self.cache = cache
        self.page_size = cache.page_size
        self._edits: list[PageSwap] = []  # page swaps that the next plan must carry to the executor
        self._swapped_out: list[IntArray] = []  # pages that the plan in the making still writes to
        self._renewed: dict[int, RowSetup] = {}  # by row: what the next plan must tell the executor of rewound rows

    def admit(self, request: Request, match: Match) -> RowSetup:
        """Seats the request on the pages of its cached prefix, whose lock passes to it."""
        table = self.table
        row = table.seat(request)
        prefix = match.pages
        table.pages[row, : len(prefix)] = prefix
        table.page_count[row] = table.tree_pages[row] = len(prefix)
        table.length[row] = match.length
        request.node = match.node
        if request.cached_tokens < 0:
            request.cached_tokens = min(int(table.length[row]), request.prompt_len)
        return self._setup(request)

    def rewind(self, request: Request, length: int) -> None:
        """The tokens behind the row's first `length` ones are others than those that steps in flight compute: they are
        prefilled anew, up to the last one known, and their pages are given back. Pages that the tree owns are not
        written to again, so a row that would have to takes fresh ones."""
        table, row = self.table, request.row
        owned = int(table.tree_pages[row])
        if length < owned * self.page_size:
            table.tree_pages[row] = length // self.page_size
            length = int(table.tree_pages[row]) * self.page_size
        kept = pages_for(length, self.page_size)
        self.cache.pool.give(table.pages[row, max(kept, owned) : table.page_count[row]])
        table.page_count[row] = kept
        table.length[row] = length
        table.sampled[row] = table.known[row] - table.prompt_len[row]
        table.phase[row] = Phase.PREFILL
        table.disown(row)
        self._edits = [edit for edit in self._edits if edit.row != row]  # the setup carries all pages
        self._renewed[row] = self._setup(request)

    def _setup(self, request: Request) -> RowSetup:
        """All that the executor must know of a seated request."""
        table, row = self.table, request.row
        known = int(table.known[row])
        return RowSetup(
            row=row,
            sampling=request.sampling,
            seed=request.seed,
            pages=(table.pages[row, : table.page_count[row]].copy(),),
            length=int(table.length[row]),
            generated=known - request.prompt_len,
            history=table.tokens[row, :known].copy() if request.sampling.penalised else None,
            prompt_len=request.prompt_len,
            logprobs=request.logprobs,
            # A grammar's mask knows when the end may come.
            stop_ids=() if request.constraint is not None else tuple(sorted(request.stop_ids)),
            processor=request.processor,
        )

    def grow(self, row: int, count: int) -> IntArray:
        """Pages for `count` more tokens of a prefill; they are appended to the row and the new prefix is shared."""
        table = self.table
        length = int(table.length[row]) + count
        have = int(table.page_count[row])
        pages = self.cache.take(pages_for(length, self.page_size) - have)
        table.pages[row, have : have + len(pages)] = pages
        table.page_count[row] += len(pages)
        table.length[row] = length
        self._share(row)
        return pages

    def grow_decodes(self, rows: RowIndex, widths: IntArray) -> tuple[IntArray, IntArray]:
        """Up to so many more tokens for each row: the new pages in row order, and how many each row got. Pages for
        drafts that do not hold stay with the row and serve its next tokens."""
        table = self.table
        lengths, held = table.length[rows] + widths, table.page_count[rows]
        counts = self._missing_pages(lengths, held)
        pages = self.cache.take(int(counts.sum()))
        if len(pages):
            if len(pages) == len(rows) and counts.all():  # one each: nothing to spread
                table.pages[rows, held] = pages
            else:
                table.pages[rows.repeat(counts), held.repeat(counts) + ranks(counts)] = pages
            table.page_count[rows] = held + counts
        table.length[rows] = lengths
        return pages, counts

    def pages_for_decodes(self, rows: RowIndex, widths: IntArray | int) -> int:
        """How many pages `grow_decodes` would take."""
        return int(self._missing_pages(self.table.length[rows] + widths, self.table.page_count[rows]).sum())

    def _missing_pages(self, lengths: IntArray, held: IntArray) -> IntArray:
        needed = lengths if self.page_size == 1 else -(-lengths // self.page_size)
        missing: IntArray = np.maximum(needed - held, 0)
        return missing

    def leave(self, request: Request) -> None:
        """Frees the row. What was computed stays in the tree for others (and for the request itself, if it was
        retracted); what is not whole or not known goes back to the pool.

        Steps in flight may still write to those pages. That is harmless: their next owner's step runs later.
        """
        table, row = self.table, request.row
        self._share(row)
        self.cache.pool.give(table.pages[row, table.tree_pages[row] : table.page_count[row]])
        self._edits = [edit for edit in self._edits if edit.row != row]
        self._renewed.pop(row, None)
        self._move_lock(request, None)
        table.unseat(request)

    def take_edits(self) -> tuple[PageSwap, ...]:
        """What a new plan must tell the executor first. Pages that the last plan's rows swapped away are free from now
        on: had they been given out at once, two rows of that plan would have written to them."""
        for pages in self._swapped_out:
            self.cache.pool.give(pages)
        self._swapped_out.clear()
        edits, self._edits = tuple(self._edits), []
        return edits

    def take_renewed(self) -> list[RowSetup]:
        """The setups of rewound rows, which a new plan must carry."""
        renewed, self._renewed = list(self._renewed.values()), {}
        return renewed

    def put_back(self, edits: tuple[PageSwap, ...], renewed: Sequence[RowSetup]) -> None:
        """There was no plan to carry these; the next one will."""
        self._edits = [*edits, *self._edits]
        self._renewed = {setup.row: setup for setup in renewed}

    def held(self) -> dict[str, IntArray]:
        """Pages that belong to rows and not to the tree, for the audit."""
        table = self.table
        held = {
            f"request {r.handle}": table.pages[r.row, table.tree_pages[r.row] : table.page_count[r.row]]
            for r in table.seated()  # by handle: users may give two requests the same rid
        }
        held["swapped out"] = np.concatenate([NO_PAGES, *self._swapped_out])
        return held

    def _share(self, row: int) -> None:
        """Gives the row's whole pages to the tree. Where the tree already has those tokens, the row moves to the tree's
        pages, and its own will go back to the pool."""
        tree = self.cache.tree
        table = self.table
        whole = table.valid_tokens(row) // self.page_size
        if not self.cache.share or whole <= table.tree_pages[row]:
            return
        request = table.request_in(row)
        own = table.pages[row, :whole]
        inserted = tree.insert(
            table.tokens[row, : whole * self.page_size], own.copy(), request.namespace, priority=request.priority
        )
        moved = np.flatnonzero(own != inserted.pages)
        if len(moved):
            first, last = int(moved[0]), int(moved[-1]) + 1
            self._swapped_out.append(own[moved])
            self._edits.append(PageSwap(row, 0, first, inserted.pages[first:last].copy()))
            own[:] = inserted.pages
        self._move_lock(request, inserted.node)
        table.tree_pages[row] = whole

    def _move_lock(self, request: Request, node: Node | None) -> None:
        """Locks the new node before the old one is let go: in between, nothing of the path may become evictable."""
        if node is not None:
            self.cache.tree.lock(node)
        if request.node is not None:
            self.cache.tree.unlock(request.node)
        request.node = node
