"""Drafts by a model beside the served one: what it knows of each row, and its two parts of a step.

Before the forward pass of the served model, the *target*, it guesses one token after the other behind each decode's
own (`guess`); after it, it computes the same tokens as the target did (`follow`). It has pages of the same numbers, so
whatever is cached of a prompt is cached for both.

A model that reads hidden states of the target stores in a token's place what it makes of the target's hidden state
there and of the token *behind* it. Where a prompt leaves a cached prefix that another request went on from with another
token, the last place of that prefix stands for the other token: the drafts there may be a little worse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch, decodes_of
from bough.attention.context import ForwardContext
from bough.attention.reading import ToDevice
from bough.core.plan import BatchPlan, IntArray, Limits, positions_in_runs
from bough.executor.layout import LongArray, StepLayout
from bough.executor.verification import Verified
from bough.memory.pools.kv_pool import KVPool
from bough.models.drafts import DraftModel
from bough.sampling.state import Agree

Tapped = dict[int, torch.Tensor | None]


class Guessed(NamedTuple):
    """The drafts of all decodes, row by row."""

    tokens: torch.Tensor  # int64
    parents: IntArray | None = None  # `BatchPlan.parents`


class Drafter:
    """Owns what the draft model keeps of the rows between two steps."""

    def __init__(
        self,
        model: DraftModel,
        pool: KVPool,
        attention: AttentionBackend,
        limits: Limits,
        agree: Agree,
        *,
        target: KVPool,
        topk: int = 1,
        dtype: torch.dtype,
        device: torch.device,
        to_device: ToDevice = torch.from_numpy,
    ) -> None:
        self._model, self._pool, self._attention, self._target = model, pool, attention, target
        self._page_size, self._to_device, self._agree = limits.page_size, to_device, agree
        self._topk, self._levels, self._last_place = topk, limits.draft_levels, limits.context_length - 1
        self._scratch = (limits.pages[0] + 1) * limits.page_size  # the first slot behind those of rows
        # Of a model that is ahead: the first drafts of the row's next step, and the hidden state that gave them.
        self._first = torch.zeros((limits.rows + 1, topk), dtype=torch.int64, device=device)
        self._scores = torch.zeros((limits.rows + 1, topk), device=device)
        self._hidden = torch.zeros((limits.rows + 1, model.config.hidden_size), dtype=dtype, device=device)

    @property
    def reads_hidden(self) -> bool:
        """Whether it wants the target's hidden states, of all tokens."""
        return self._model.ahead

    def taps(self) -> Tapped | None:
        """For the context of the target's forward pass."""
        draft = self._model.config.draft
        return dict.fromkeys(draft.taps) if draft is not None and draft.taps else None

    def guess(
        self, plan: BatchPlan, layout: StepLayout, page_tables: tuple[torch.Tensor, ...], last: torch.Tensor
    ) -> Guessed:
        """`last` are the tokens that the decodes begin with."""
        wanted = plan.query_lens[: len(last)] - 1
        live: LongArray = np.flatnonzero(wanted)  # decodes that get further drafts
        drafts = torch.zeros((len(last), int(wanted.max())), dtype=torch.int64, device=last.device)
        ahead, places = self._model.ahead, self._to_device(live)
        tokens, hidden = last[places], None
        if ahead:
            rows = self._to_device(plan.rows[live].astype(np.int64))
            tokens, hidden = self._first[rows, 0], self._hidden[rows]
            drafts[places, 0] = tokens
        for column in range(ahead, drafts.shape[1]):
            kept = wanted[live] > column
            if not kept.all():
                among = self._to_device(np.flatnonzero(kept))
                live, places, tokens = live[kept], places[among], tokens[among]
                hidden = None if hidden is None else hidden[among]
            batch = self._column(layout, live, column - ahead, page_tables)
            hidden, context = self._advance(tokens, hidden, batch)
            tokens = self._best(hidden, context)[0][:, 0]
            drafts[places, column] = tokens
        given = np.flatnonzero(np.arange(drafts.shape[1]) < wanted[:, None])
        return Guessed(drafts.flatten()[self._to_device(given)])

    def _advance(
        self, tokens: torch.Tensor, hidden: torch.Tensor | None, batch: AttentionBatch
    ) -> tuple[torch.Tensor, ForwardContext]:
        """The hidden states of these tokens, and what they were computed with."""
        self._attention.prepare(batch)
        context = ForwardContext(self._attention, self._pool, batch)
        return self._model.advance(tokens, hidden, context), context

    def _best(self, hidden: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens behind these states, with their scores. [n, topk]"""
        best, scores = self._model.best(hidden, context, self._topk)
        return self._agree(best), scores if self._topk == 1 else self._agree(scores)

    def _column(
        self, layout: StepLayout, live: LongArray, column: int | IntArray, page_tables: tuple[torch.Tensor, ...]
    ) -> AttentionBatch:
        """One token of each of some rows, so many places behind the first that they compute in this step."""
        context, at = layout.context_lens[live] + column, layout.query_starts[live] + column
        slots = tuple(self._to_device(np.ascontiguousarray(layout.slots[:, at])))
        rows, lengths, positions = map(self._to_device, (layout.rows[live], context + 1, layout.positions[at]))
        return decodes_of(rows, lengths, positions, slots, page_tables, self._page_size, context)

    def follow(
        self,
        plan: BatchPlan,
        layout: StepLayout,
        batch: AttentionBatch,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        tapped: Tapped | None,
        sampled: Verified,
    ) -> None:
        """The target has computed these tokens, with these hidden states, and its rows have got what was sampled.
        `batch` has them as chains."""
        tokens, counts = sampled.tokens, sampled.counts
        if plan.parents is not None:
            order = self._straighten(plan, layout, sampled)
            token_ids, hidden = token_ids[order], hidden[order] if self.reads_hidden else hidden
            tapped = {tap: None if of is None else of[order] for tap, of in (tapped or {}).items()} or None
        if not self._model.ahead:
            self._repeat(plan, layout, batch, token_ids, counts)
            return
        behind, last = tokens_behind(plan, layout, tokens, counts)
        rows, taken = plan.rows[plan.sample].astype(np.int64), self.take_in(hidden, tapped, batch)
        self.read(self._to_device(rows), batch, self._to_device(behind), taken, self._to_device(last))

    def take_in(self, hidden: torch.Tensor, tapped: Tapped | None, batch: AttentionBatch) -> torch.Tensor:
        """What it reads of the target's hidden states."""
        draft = self._model.config.draft
        read = [hidden] if tapped is None or draft is None else [tapped[tap] for tap in draft.taps]
        context = ForwardContext(self._attention, self._pool, batch)
        return self._model.take_in([states for states in read if states is not None], context)

    def read(
        self, rows: torch.Tensor, batch: AttentionBatch, behind: torch.Tensor, taken: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Computes each of the target's tokens from what it took in there and the token behind, and guesses what comes
        after `last`, those that hold of each of the rows."""
        found, context = self._advance(behind, taken, batch)
        if len(last):
            self._hidden[rows] = found = found[last]
            self._first[rows], scores = self._best(found, context)
            if self._topk > 1:
                self._scores[rows] = scores

    def chain(self, tokens: torch.Tensor, rows: torch.Tensor, batch_of: Callable[[slice], AttentionBatch]) -> None:
        """Guesses behind the first of `tokens` [width, rows], in place; `batch_of` gives columns of the step."""
        width, size = tokens.shape
        ahead, last, hidden = self._model.ahead, tokens[0], None
        if ahead and width > 1:
            last, hidden = self._first[rows, 0], self._hidden[rows]
            tokens[1].copy_(last)
        for column in range(width - 2 if ahead else width):  # one that is not ahead computes the last draft as well
            hidden, context = self._advance(last, hidden, batch_of(slice(column * size, (column + 1) * size)))
            if column + ahead + 1 < width:
                last = self._best(hidden, context)[0][:, 0]
                tokens[column + ahead + 1].copy_(last)

    def _repeat(
        self, plan: BatchPlan, layout: StepLayout, batch: AttentionBatch, token_ids: torch.Tensor, counts: IntArray
    ) -> None:
        """Computes the same tokens. In a step of decodes it has computed all but each row's last one when it guessed,
        and that is missing only if all before it hold. What it computed of a tree is lost."""
        if len(layout.from_device) == len(plan.rows) and plan.parents is None:
            live: LongArray = np.flatnonzero(counts == plan.query_lens)
            if not len(live):
                return
            last = plan.query_lens[live] - 1
            token_ids = token_ids[self._to_device((layout.query_starts[live] + last).astype(np.int64))]
            batch = self._column(layout, live, last, batch.page_tables)
        end = self._to_device(np.array([len(token_ids) - 1]))  # of what comes out nothing is looked at
        self._attention.prepare(batch)
        context = ForwardContext(self._attention, self._pool, batch, end)
        self._model.advance(token_ids, None, context)

    def _straighten(self, plan: BatchPlan, layout: StepLayout, sampled: Verified) -> torch.Tensor:
        """Moves what the target keeps of the drafts that hold to where a chain of them stands. Which token of the step
        each place has now."""
        origin, to = sampled.moves(layout.query_starts[1:][plan.sample])
        order = np.arange(len(layout.token_ids))
        order[to] = origin
        for group, slots in zip(self._target.groups, layout.slots, strict=True):
            group.move(self._to_device(slots[origin]), self._to_device(slots[to]))
        return self._to_device(order)


def tokens_behind(
    plan: BatchPlan, layout: StepLayout, tokens: LongArray, counts: IntArray
) -> tuple[LongArray, LongArray]:
    """The token behind each of a step, as far as it holds; and where the last that holds of each sampling row is."""
    behind = np.roll(layout.token_ids, -1)
    ends, widths = layout.query_starts[1:].astype(np.int64), plan.sample_widths
    if plan.next_tokens is not None:
        behind[ends[len(ends) - len(plan.next_tokens) :] - 1] = plan.next_tokens
    first = ends[plan.sample] - widths
    columns = np.arange(tokens.shape[1])
    behind[(first[:, None] + columns)[columns < widths[:, None]]] = tokens[columns < widths[:, None]]
    return behind, first + counts - 1


def with_drafts(plan: BatchPlan, drafts: Guessed) -> BatchPlan:
    """The same plan, with the tokens that the device has guessed as if they were given. Decodes stand first."""
    decodes = plan.given < plan.query_lens
    given = np.where(decodes, plan.query_lens - 1, plan.given).astype(np.int32)
    tokens = drafts.tokens.cpu().numpy().astype(np.int32)
    return replace(plan, given=given, tokens=np.concatenate([tokens, plan.tokens]), parents=drafts.parents)


def draft_places(layout: StepLayout) -> LongArray:
    """Where the drafts of the decodes stand among the tokens of a step."""
    counts = layout.query_lens[: len(layout.from_device)] - 1
    return (layout.from_device.repeat(counts) + 1 + positions_in_runs(counts)).astype(np.int64)
