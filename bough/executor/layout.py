"""What a plan means for the rows, in host integers: the executors' common half, whatever device they drive.

`RowMirror` keeps the page tables, page counts and lengths of every row as numpy arrays. Each plan makes rows longer
(`Growth`) and is turned into a `StepLayout`: where every token of the step stands and goes. All of it is vectorised; a
steady decode step costs a few numpy calls, and fewer where the device finds out by itself where the tokens go.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bough.attention.batch import AttentionBatch
from bough.attention.reading import ToDevice
from bough.core.plan import BatchPlan, InputLogprobs, IntArray, Limits, RowSetup, positions_in_runs

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableWrites:
    """Changes of the page tables: flat places in [groups, rows, pages per row] and the pages that stand there now."""

    places: LongArray
    pages: IntArray


NO_WRITES = TableWrites(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class Growth:
    """How a step changes its rows."""

    context_lens: IntArray  # [batch] tokens of the row in the cache before this step
    lengths: IntArray  # [batch] and after it
    rewritten: TableWrites  # what setups and edits changed in the page table
    appended: TableWrites  # the pages that rows got with this step


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step, rows back to back in the token dimension."""

    rows: IntArray  # [batch]
    query_lens: IntArray  # [batch]
    query_starts: IntArray  # [batch + 1]
    context_lens: IntArray  # [batch] tokens of the row in the cache before this step
    lengths: IntArray  # [batch] and after it
    positions: LongArray  # [tokens] in their sequences
    rotary: LongArray  # [tokens] or [3, tokens], by which they rotate
    slots: LongArray  # [groups, tokens] where each token's key and value go: page * page_size + offset
    token_ids: LongArray  # [tokens] as far as the host knows them
    from_device: IntArray  # places in `token_ids` of the last token that a row sampled, which only the device knows
    adapters: LongArray  # [tokens] the slots of their rows' adapters; 0: none
    common: IntArray | None = None  # [batch] `BatchPlan.common`

    def batch(
        self, to_device: ToDevice, page_tables: tuple[torch.Tensor, ...], page_size: int, both_ways: IntArray | None
    ) -> AttentionBatch:
        """The step as attention takes it. Decodes, which stand first, attend as prompts do where they have drafts."""
        decodes, host = len(self.from_device), (self.query_lens, self.query_starts, self.context_lens)
        drafted = decodes if self.query_starts[decodes] > decodes else 0
        rows, lengths, starts = to_device(self.rows), to_device(self.lengths), to_device(self.query_starts)
        slots, positions = tuple(to_device(self.slots)), to_device(self.rotary)
        own: dict[str, Any] = {"starts": starts, "both_ways": both_ways, "common": self.common, "drafted": drafted}
        return AttentionBatch(rows, lengths, decodes - drafted, *host, page_tables, slots, positions, page_size, **own)

    @property
    def draft_places(self) -> LongArray:
        """Where the drafts of decodes stand among the tokens of the step."""
        counts = self.query_lens[: len(self.from_device)] - 1
        return (self.from_device.repeat(counts) + 1 + positions_in_runs(counts)).astype(np.int64)


class RowMirror:
    """Owns the host's copy of what each row occupies. Behind the rows there is one that padding uses on a device."""

    def __init__(self, limits: Limits) -> None:
        self._page_size = limits.page_size
        self._width = -(-limits.context_length // limits.page_size)
        self.pages = np.zeros((len(limits.pages), limits.rows + 1, self._width), dtype=np.int32)
        self._flat_pages = self.pages.reshape(-1)
        # Groups whose pages grow with the row; of states, the last, a row has one page for good.
        self._growing = len(limits.pages) - (limits.groups[-1].kind == "state")
        self._page_counts = np.zeros(limits.rows, dtype=np.int32)
        self._lengths = np.zeros(limits.rows, dtype=np.int32)
        self.adapters = np.zeros(limits.rows + 1, dtype=np.int64)
        self.deltas = np.zeros(limits.rows + 1, dtype=np.int64)
        self._has_media = limits.media is not None

    def apply(self, plan: BatchPlan) -> StepLayout:
        """Brings the rows up to date with a plan and lays it out."""
        return self.lay_out(plan, self.grow(plan))

    def grow(self, plan: BatchPlan) -> Growth:
        """Brings the rows up to date with a plan."""
        rewritten = NO_WRITES
        if plan.setups or plan.edits:
            edits = (self._write(edit.group, edit.row, edit.first, edit.pages) for edit in plan.edits)
            rewritten = _joined([NO_WRITES, *(each for setup in plan.setups for each in self._set_up(setup)), *edits])
        rows = plan.rows.astype(np.int64)  # as numpy indexes: it would convert them at every use
        appended = self._append(plan, rows)
        context_lens = self._lengths[rows]
        lengths = context_lens + plan.query_lens
        self._lengths[rows] = lengths
        return Growth(context_lens, lengths, rewritten, appended)

    def lay_out(self, plan: BatchPlan, growth: Growth) -> StepLayout:
        """Where the tokens of the plan that the rows were brought up to date with stand and go."""
        starts = np.zeros(len(plan.rows) + 1, dtype=np.int32)
        np.cumsum(plan.query_lens, out=starts[1:])
        rows, positions = _spread(plan.rows, plan.query_lens, starts, growth.context_lens)
        # In the order that kernels expect: numpy lays the result of such an index out token by token.
        slots = self.pages[:, rows, positions // self._page_size].astype(np.int64, order="C")
        slots = slots * self._page_size + positions % self._page_size
        from_device = starts[:-1][plan.given < plan.query_lens]
        rotary = positions + self.deltas[rows] if self._has_media else positions
        if plan.positions is not None:
            rotary = np.concatenate([np.tile(rotary, (3, 1))[:, : -plan.positions.shape[1]], plan.positions], axis=1)
        return StepLayout(
            rows=plan.rows,
            query_lens=plan.query_lens,
            query_starts=starts,
            context_lens=growth.context_lens,
            lengths=growth.lengths,
            positions=positions,
            rotary=rotary,
            slots=slots,
            token_ids=_place_tokens(plan, starts),
            from_device=from_device,
            adapters=self.adapters[rows],
            common=plan.common,
        )

    def tree_batch(
        self, layout: StepLayout, parents: IntArray, to_device: ToDevice, both_ways: IntArray | None = None
    ) -> AttentionBatch:
        """A step with trees (`BatchPlan.parents`) as attention takes it. A draft attends to the row's prefix and to the
        drafts that it follows: it is a decode with a page table of its own, of pages of one token, so no kernel knows
        of trees. Prompts stand behind."""
        decodes, size = len(layout.from_device), self._page_size
        widths, count = layout.query_lens[:decodes], int(layout.query_starts[decodes])
        follows = np.full(count, -1, dtype=np.int64)
        follows[layout.draft_places] = layout.query_starts[:decodes].repeat(widths - 1) + parents
        depths, at = np.zeros(count, dtype=np.int32), follows
        while (at >= 0).any():
            depths, at = depths + (at >= 0), np.where(at >= 0, follows[at], -1)
        times = np.concatenate((widths, np.ones(len(layout.rows) - decodes, dtype=np.int32)))
        rows, context = layout.rows.repeat(times), layout.context_lens.repeat(times)
        context[:count] += depths
        query_lens = np.concatenate((np.ones(count, dtype=np.int32), layout.query_lens[decodes:]))
        starts, lengths = np.concatenate(([0], query_lens.cumsum())).astype(np.int32), context + query_lens
        places, at = np.arange(int(lengths.max()), dtype=np.int32), np.arange(count)
        lines = np.ascontiguousarray(self.pages[:, rows[:, None], places // size]) * size + places % size
        for up in range(int(depths.max()) + 1):  # from each node on to those that it follows
            own = np.flatnonzero(at >= 0)
            lines[:, own, context[own] - up] = layout.slots[:, at[own]]
            at = np.where(at >= 0, follows[at], -1)
        rotary = layout.rotary.copy()
        rotary[..., :count] += depths - positions_in_runs(widths)
        tree = replace(
            layout,
            rows=np.arange(len(rows), dtype=np.int32),
            query_lens=query_lens,
            query_starts=starts,
            context_lens=context,
            lengths=lengths,
            rotary=rotary,
            from_device=starts[:count],
            common=None,
        )
        return tree.batch(to_device, tuple(map(to_device, lines)), 1, both_ways)

    def give_back(self, rows: IntArray, missing: IntArray) -> None:
        """So many of the tokens that these rows computed last did not hold."""
        self._lengths[rows] -= missing

    def held_by(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The page tables, page counts and lengths of rows."""
        counts = self._page_counts[rows]
        return self.pages[:, rows, : counts.max(initial=1)], counts, self._lengths[rows]

    def _set_up(self, setup: RowSetup) -> list[TableWrites]:
        self._page_counts[setup.row] = len(setup.pages[0])
        self._lengths[setup.row] = setup.length
        self.adapters[setup.row] = setup.adapter
        self.deltas[setup.row] = setup.delta
        # Of states, behind its own page, the row names the one that it begins with: see `StateCopies`.
        tables = (*setup.pages[: self._growing], *(pages[:1] for pages in setup.pages[self._growing :]))
        return [self._write(group, setup.row, 0, pages) for group, pages in enumerate(tables) if len(pages)]

    def _write(self, group: int, row: int, first: int, pages: IntArray) -> TableWrites:
        self.pages[group, row, first : first + len(pages)] = pages
        start = (group * self.pages.shape[1] + row) * self._width + first
        return TableWrites(np.arange(start, start + len(pages), dtype=np.int64), pages)

    def _append(self, plan: BatchPlan, rows: LongArray) -> TableWrites:
        """Adds pages at the end of the rows' tables, to each group's as many."""
        pages, counts = plan.new_pages[0], plan.new_page_counts[0]
        if not len(pages):
            return NO_WRITES
        receivers = rows.repeat(counts)
        places = receivers * self._width + self._page_counts[receivers]
        if counts.max() > 1:
            places += positions_in_runs(counts)
        if self._growing > 1:
            group_size = self.pages.shape[1] * self._width
            places = np.concatenate([places + group * group_size for group in range(self._growing)])
            pages = np.concatenate(plan.new_pages[: self._growing])
        self._flat_pages[places] = pages
        self._page_counts[rows] += counts
        return TableWrites(places, pages)


def _joined(writes: list[TableWrites]) -> TableWrites:
    if len(writes) == 1:
        return writes[0]
    return TableWrites(np.concatenate([w.places for w in writes]), np.concatenate([w.pages for w in writes]))


def _spread(
    rows: IntArray, query_lens: IntArray, starts: IntArray, context_lens: IntArray
) -> tuple[IntArray, LongArray]:
    """For each token of the step, its row and its position in the row's sequence."""
    if len(rows) == int(starts[-1]):  # one token each: nothing to spread
        return rows, context_lens.astype(np.int64)
    offsets = np.arange(int(starts[-1]), dtype=np.int64) - np.repeat(starts[:-1], query_lens)
    return np.repeat(rows, query_lens), np.repeat(context_lens, query_lens) + offsets


def _place_tokens(plan: BatchPlan, starts: IntArray) -> LongArray:
    """Given tokens in their places: those of a decode behind its first. The others stay 0."""
    ids = np.zeros(int(starts[-1]), dtype=np.int64)
    if len(plan.tokens) == len(ids):
        ids[:] = plan.tokens
    elif len(plan.tokens):
        first = starts[:-1] + (plan.given < plan.query_lens)
        ids[first.repeat(plan.given) + positions_in_runs(plan.given)] = plan.tokens
    return ids


def has_drafts(plan: BatchPlan) -> bool:
    return bool(((plan.given < plan.query_lens) & (plan.query_lens > 1)).any())


def sampled_tokens(plan: BatchPlan, query_starts: IntArray) -> LongArray:
    """The places of the tokens that are sampled from: the rows' last ones, and of decodes with drafts all, row by row.
    Never empty, because no product likes to be: of a step in which nobody samples, the last token. [n] int64"""
    ends = query_starts[1:]
    if not plan.sample.any():
        return ends[-1:].astype(np.int64) - 1
    if not has_drafts(plan):
        return ends[plan.sample].astype(np.int64) - 1
    widths = plan.sample_widths
    return ((ends[plan.sample] - widths).repeat(widths) + positions_in_runs(widths)).astype(np.int64)


def prompt_targets(plan: BatchPlan, want: InputLogprobs) -> LongArray:
    """The prompt tokens whose logprobs are asked: position p of the chunk tells of the token at p + 1, which for the
    last one is not in the plan's tokens. [count] int64"""
    before = int(plan.given[: want.index].sum())
    given = plan.tokens[before : before + int(plan.given[want.index])]
    return np.append(given[want.first + 1 :], want.next_token)[: want.count].astype(np.int64)
