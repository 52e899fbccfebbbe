"""The running requests and their pages: admitting a request to a row, growing it, and releasing it.

A chunk enters the tree as soon as it is planned: plans run in order and every layer stores before it attends, so a
request that matches the chunk reads it after it was written, even in the same plan.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bough.core.plan import IntArray, PageSwap, RowSetup
from bough.memory.tree.audit import Audit
from bough.memory.tree.node import Node
from bough.memory.tree.tree import NO_PAGES, Match
from bough.scheduler.prefix_cache import PrefixCache, pages_for
from bough.scheduler.request import Request
from bough.scheduler.rows import Phase, RowIndex, RowTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a row's state after the tokens `key`, in a page of a state group."""

    key: IntArray
    namespace: str
    group: int
    page: IntArray  # [1]


class RunningBatch:
    def __init__(self, table: RowTable, cache: PrefixCache) -> None:
        self.table = table
        self.cache = cache
        self.page_size = cache.page_size
        self.matched_tokens = 0  # that admitted requests found in the cache, after a retraction too
        self.moves = 0  # changes with where any running request stands in the tree
        self._edits: list[PageSwap] = []  # page swaps that the next plan must carry to the executor
        self._swapped_out: list[IntArray] = []  # pages that the plan in the making still writes to
        self._taken: list[Snapshot] = []  # copies of states that the plan in the making writes
        self._renewed: dict[int, RowSetup] = {}  # by row: what the next plan must tell the executor of rewound rows

    def admit(self, request: Request, match: Match, fetched: int = 0) -> RowSetup:
        """Gives the request a row that begins with the pages of its cached prefix, whose lock passes to it; the last
        `fetched` tokens of that come from the tier below."""
        self.moves += 1
        self.table.assign(request)
        states = self._begin(request, match)
        request.lock(match.node)
        request.count_cached(match.length, fetched)
        self.matched_tokens += match.length
        return self._setup(request, states)

    def branch(self, match: Match) -> int:
        """Where a prompt leaves the tree and finds no state to go on with, but one could be kept for the next that
        comes by; 0: nowhere."""
        could = any(group.is_state and group.available > self.table.free_rows for group in self.cache.groups)
        return match.known if could and self.cache.share else 0

    def rewind(self, request: Request, length: int) -> None:
        """The tokens behind the row's first `length` ones are others than those that steps in flight compute: they are
        prefilled anew, up to the last one known, and their pages are given back. Pages that the tree owns are not
        written to again, so a row that would have to takes fresh ones."""
        self.moves += 1
        table, row = self.table, request.row
        owned, count, states = int(table.tree_pages[row]), int(table.page_count[row]), list[int]()
        if length < owned * self.page_size:
            length -= length % self.page_size
        kept = pages_for(length, self.page_size)
        if any(group.is_state for group in self.cache.groups):
            # A state cannot go back: the row begins again where the tree has one.
            self.cache.pool.give(table.pages[row, owned:count])
            self._release_groups(row)
            match = self.cache.match_and_lock(table.tokens[row, :length], request.namespace)
            states = self._begin(request, match)
            assert request.node is not None
            self.cache.tree.unlock(request.node)
            request.lock(match.node)
            length, kept = match.length, len(match.pages)
        else:
            self.cache.pool.give(table.pages[row, max(kept, owned) : count])
            for group, pages in zip(self.cache.groups, table.group_pages, strict=True):
                group.release(pages[row, kept:count])
        table.rewind(row, kept, length)
        self._edits = [edit for edit in self._edits if edit.row != row]  # the setup carries all pages
        self._renewed[row] = self._setup(request, states)

    def _begin(self, request: Request, match: Match) -> list[int]:
        """The row has the matched pages, and a page for each of its states; returns where those begin (0: with that of
        nothing)."""
        group_pages, states = [], []
        for group, found in zip(self.cache.groups, match.group_pages, strict=True):
            if group.is_state:
                states.append(int(found[-1]) if len(found) else 0)
                group.release(found[found > 0])  # the plan copies it before anything else is written there
                found = group.take(1)
            group_pages.append(found)
        self.table.begin(request.row, match.pages, match.length, group_pages)
        return states

    def _release_groups(self, row: int) -> None:
        for index, group in enumerate(self.cache.groups):
            group.release(self.table.held_pages(index, row))

    def _setup(self, request: Request, states: Sequence[int]) -> RowSetup:
        """All that the executor must know of a running request, which begins with these states (0: of nothing)."""
        table, row = self.table, request.row
        known, count = int(table.known[row]), int(table.page_count[row])
        pages, begin_with = [table.pages[row, :count].copy()], iter(states)
        for group, of_group in zip(self.cache.groups, table.group_pages, strict=True):
            if group.is_state:
                pages.append(np.array([of_group[row, 0], next(begin_with)], dtype=np.int32))
            else:
                pages.append(of_group[row, :count].copy())
        audio = None if request.media is None or request.media.items[0].spans else request.media.items[0]
        return RowSetup(
            row=row,
            sampling=request.sampling,
            seed=request.seed,
            pages=tuple(pages),
            length=int(table.length[row]),
            generated=known - request.prompt_len,
            history=table.tokens[row, :known].copy() if request.sampling.penalised or audio else None,
            prompt_len=request.prompt_len,
            logprobs=request.logprobs,
            # A grammar's mask knows when the end may come.
            stop_ids=() if request.constraint is not None else tuple(sorted(request.stop_ids)),
            processor=request.processor,
            adapter=request.slot,
            pooling=request.pooling,
            audio=audio,
            delta=0 if request.media is None else request.media.delta,
        )

    def grow(self, row: int, count: int) -> tuple[IntArray, ...]:
        """Pages of each group for `count` more tokens of a prefill; they are appended to the row and the new prefix is
        shared."""
        length = int(self.table.length[row]) + count
        missing = max(0, pages_for(length, self.page_size) - int(self.table.page_count[row]))
        pages = self.cache.take(missing)
        group_pages = [NO_PAGES if group.is_state else group.take(missing) for group in self.cache.groups]
        self.table.extend(row, length, pages, group_pages)
        self._share(row)
        return pages, *self._snapshots(row, length, tuple(group_pages))

    def grow_decodes(self, rows: RowIndex, widths: IntArray) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
        """Up to so many more tokens for each row: of each group the new pages in row order, and how many each row got.
        Pages for drafts that do not hold stay with the row and serve its next tokens."""
        table = self.table
        lengths = table.length[rows] + widths
        counts = self._missing_pages(lengths, table.page_count[rows])
        missing = int(counts.sum())
        pages = self.cache.take(missing)
        group_pages = [NO_PAGES if group.is_state else group.take(missing) for group in self.cache.groups]
        table.grow(rows, lengths, counts, pages, group_pages)
        of_groups = tuple(counts if len(new) == missing else np.zeros_like(counts) for new in group_pages)
        return (pages, *group_pages), (counts, *of_groups)

    def release_passed(self) -> None:
        """Gives up the pages that rows have left behind their windows. Steps in flight may still read them; steps that
        write to them run later."""
        table = self.table
        for index, group in enumerate(self.cache.groups):
            if group.is_state:
                continue
            rows = (table.phase != Phase.FREE).nonzero()[0]
            first = group.first_needed(np.minimum(table.length[rows], table.known[rows] - 1))
            passing = first > table.group_first[index][rows]
            if passing.any():
                group.release(table.pass_pages(index, rows[passing], first[passing]))

    def _snapshots(self, row: int, length: int, group_pages: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        """The new pages of each further group, with those that copies of the row's states go to: at the end of a chunk
        of whole pages, if others may find it and no row needs the memory. They enter the tree with the next plan:
        steps of this one cannot read them yet."""
        table, found = self.table, list(group_pages)
        for index, group in enumerate(self.cache.groups):
            if not group.is_state or not self.cache.share or length % self.page_size:
                continue
            if group.available > table.free_rows and length == table.valid_tokens(row):
                found[index] = group.take(1)
                key, namespace = table.tokens[row, :length].copy(), table.request_in(row).namespace
                self._taken.append(Snapshot(key, namespace, index, found[index]))
        return tuple(found)

    def pages_for_decodes(self, rows: RowIndex, widths: IntArray | int) -> int:
        return int(self._missing_pages(self.table.length[rows] + widths, self.table.page_count[rows]).sum())

    def _missing_pages(self, lengths: IntArray, held: IntArray) -> IntArray:
        needed = lengths if self.page_size == 1 else -(-lengths // self.page_size)
        missing: IntArray = np.maximum(needed - held, 0)
        return missing

    def leave(self, request: Request, *, spoilt: bool = False) -> None:
        """Frees the row. What was computed stays in the tree for others (and for the request itself, if it was
        retracted), unless it is `spoilt`; what is not whole or not known goes back to the pool.

        Steps in flight may still write to those pages. That is harmless: their next owner's step runs later.
        """
        table, row = self.table, request.row
        spoilt_tokens = table.tokens[row, : table.valid_tokens(row)].copy() if spoilt else None
        if not spoilt:
            self._share(row)
            if self.cache.share and request.node is not None:
                shared = table.tokens[row, : table.tree_pages[row] * self.page_size]
                self.cache.note(shared, request.namespace, ended=request.node)
        self.cache.pool.give(table.pages[row, table.tree_pages[row] : table.page_count[row]])
        self._release_groups(row)
        self._edits = [edit for edit in self._edits if edit.row != row]
        self._renewed.pop(row, None)
        self._move_lock(request, None)
        table.free(request)
        if spoilt_tokens is not None:  # by itself or its prefix: what is not finite makes all that reads it so
            self.cache.forget(spoilt_tokens, request.namespace)

    def take_edits(self) -> tuple[PageSwap, ...]:
        """What a new plan must tell the executor first. Pages that the last plan's rows swapped away are free from now
        on: had they been given out at once, two rows of that plan would have written to them."""
        for pages in self._swapped_out:
            self.cache.pool.give(pages)
        self._swapped_out.clear()
        for snapshot in self._taken:
            self.cache.tree.attach(snapshot.key, snapshot.namespace, snapshot.group, int(snapshot.page[0]))
            self.cache.groups[snapshot.group].release(snapshot.page)
            self.cache.note(snapshot.key, snapshot.namespace)
        self._taken.clear()
        self.cache.launched()
        edits, self._edits = tuple(self._edits), []
        return edits

    def take_renewed(self) -> list[RowSetup]:
        renewed, self._renewed = list(self._renewed.values()), {}
        return renewed

    def put_back(self, edits: tuple[PageSwap, ...], renewed: Sequence[RowSetup]) -> None:
        """There was no plan to carry these; the next one will."""
        self._edits = [*edits, *self._edits]
        self._renewed = {setup.row: setup for setup in renewed}

    def audit(self) -> Audit:
        """Of the pages that belong to rows and not to the tree."""
        table, group_held = self.table, []
        rows = {f"request {r.handle}": r.row for r in table.running_requests()}  # users may give two the same rid
        held = {name: table.pages[row, table.tree_pages[row] : table.page_count[row]] for name, row in rows.items()}
        held["swapped out"] = np.concatenate([NO_PAGES, *self._swapped_out])
        for index in range(len(self.cache.groups)):
            of_group = {name: table.held_pages(index, row) for name, row in rows.items()}
            taken = [snapshot.page for snapshot in self._taken if snapshot.group == index]
            of_group["snapshots"] = np.concatenate([NO_PAGES, *taken])
            group_held.append(of_group)
        return self.cache.audit(held, group_held)

    def repair(self) -> None:
        """Checks the books of all pages while nothing runs, and gives back what nobody owns."""
        audit = self.audit()
        if (locked := self.cache.tree.protected_pages) != (pinned := self.cache.pinned_pages()):
            audit.problems.append(f"nothing runs and {locked} pages are locked, but sessions keep {pinned}")
        if audit.problems:
            log.error("the page accounts do not add up; repairing what is safe:\n%s", "\n".join(audit.problems))
            self.cache.pool.repair(audit.leaked)

    def _share(self, row: int) -> None:
        """Gives the row's whole pages to the tree. Where the tree already has those tokens, the row moves to the tree's
        pages, and its own will go back to the pool."""
        tree, table = self.cache.tree, self.table
        whole = table.valid_tokens(row) // self.page_size
        if not self.cache.share or whole <= table.tree_pages[row]:
            return
        request = table.request_in(row)
        own = table.pages[row, :whole]
        inserted = tree.insert(
            table.tokens[row, : whole * self.page_size],
            own.copy(),
            request.namespace,
            priority=request.priority,
            group_pages=[self._offered(index, row, whole) for index in range(len(self.cache.groups))],
        )
        moved = np.flatnonzero(own != inserted.pages)
        if len(moved):
            first, last = int(moved[0]), int(moved[-1]) + 1
            self._swapped_out.append(own[moved])
            self._edits.append(PageSwap(row, 0, first, inserted.pages[first:last].copy()))
        self.cache.note(table.tokens[row, : whole * self.page_size], request.namespace)
        table.move_to_tree(row, inserted.pages)
        self._move_lock(request, inserted.node)

    def _offered(self, group: int, row: int, whole: int) -> IntArray:
        """The row's pages of a further group that the tree may cache, one for each page of tokens; 0: none."""
        offered = np.zeros(whole, dtype=np.int32)
        if not self.cache.groups[group].is_state:
            first = int(self.table.group_first[group][row])
            offered[first:] = self.table.group_pages[group][row, first:whole]
        return offered

    def _move_lock(self, request: Request, node: Node | None) -> None:
        """Locks the new node before the old one is let go: in between, nothing of the path may become evictable."""
        self.moves += 1
        if node is not None:
            self.cache.tree.lock(node)
        if request.node is not None:
            self.cache.tree.unlock(request.node)
        request.lock(node)
